"""stageline lm-eval from its options, on two processes, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from commands import lm_eval as entry
from stageline.errors import UserError
from tests.helpers.forked_entry import run_entry
from tests.helpers.lm_eval_results import TASKS, save_task_model

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task_model(tmp_path_factory.mktemp("model"))


def run(folder, *words):
    return run_entry(
        ["-m", "stageline", "lm-eval", "--model-path", folder, "--device", "cpu", *words],
        cwd=ROOT,  # the data files of the tasks are relative to it
        env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def figures(folder):
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]["commands_choice"]


def test_two_stages_give_the_figures_of_lm_evals_own_model(folder, tmp_path, monkeypatch):
    tasks = ["--tasks", "commands_choice", "--lm-eval.include_path", TASKS, "--num-fewshot", 1]
    done = run(
        folder, *tasks, "--num-stages", 2, "--output-path", tmp_path, "--lm-eval.log_samples"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "|commands_choice|" in done.stdout
    assert f"the results are in {tmp_path}" in done.stdout
    monkeypatch.chdir(ROOT)
    theirs = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        device="cpu",
        tasks=["commands_choice"],
        num_fewshot=1,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(TASKS), include_defaults=False),
    )
    expected = {
        name: value
        for name, value in theirs["results"]["commands_choice"].items()
        if isinstance(value, float)
    }
    assert {name: figures(tmp_path)[name] for name in expected} == pytest.approx(expected)


def test_a_missing_package_is_named_with_its_cure(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["lm-eval", "--model-path", str(folder), "--tasks", "x"])
    with pytest.raises(UserError, match="setup.sh lm-eval"):
        entry.main()
