"""Wrong configuration: code 2 with the place and the cure, before any process starts."""

import os
import shutil
import subprocess

import pytest

from commands.train import SHELF
from parse_args import parse_train_args
from register import ALL_REGISTERS, import_parts, import_shelf
from tests.helpers.ready_venv import mark_ready
from tests.helpers.small_run import ROOT, Job

import_shelf(*SHELF)
TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline"
).split()


def rows(*, dataset_path, split="train", names: list[str] | None = None, table: dict | None = None):
    """Rows."""


@pytest.fixture
def parts():
    for register in ALL_REGISTERS.values():
        register.data = {}
    for option, key in zip(TRAIN[::2], TRAIN[1::2], strict=True):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None
    ALL_REGISTERS["dataset"].register("rows", rows, replace=True)


def error_of(*words):
    """Return the message of a command line."""
    with pytest.raises(Exception) as caught:
        parse_train_args([*TRAIN, *map(str, words)])
    assert caught.value.exit_code == 2, caught.value
    return str(caught.value)


def assert_in(message, *wanted):
    assert not [text for text in wanted if text not in message], message


# -- H1, H2: expressions, malformed lists ---------------------------------------------


@pytest.mark.parametrize("form", ["{}", "[1, {}]"])
def test_h01_an_expression_is_not_evaluated(parts, tmp_path, form):
    canary = tmp_path / "X"
    code = form.format(f"__import__('os').system('touch {canary}')")
    assert_in(error_of(f"--partition={code}"), "--partition", "has a wrong value")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("seed: 1\nbatch-size: 4\nseed: 2\n", ["'seed' comes twice", "line 3"]),
        ("seed: [1\nbatch-size: 4\n", ["is not plain YAML", "line 2"]),
    ],
)
def test_h02_a_malformed_config_file(parts, tmp_path, text, wanted):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert_in(error_of("--config", file), str(file), *wanted)


# -- H9, H10: registers and YAML ---------------------------------------------------------------


def test_h09_a_name_that_is_taken_names_both_places(tmp_path):
    part = tmp_path / "mine_for_h09.py"
    part.write_text(
        '"""A part."""\n\nfrom register import loss_fn_register\n\n\n'
        '@loss_fn_register("sft")\ndef sft(output, batch, *, num_targets):\n    """Mine."""\n'
    )
    with pytest.raises(ValueError) as caught:
        import_parts([str(part)])
    assert caught.value.exit_code == 2
    assert_in(str(caught.value), "sft", "loss_fn.py:", f"{part.name}:")


@pytest.mark.parametrize("place", ["config", "value"])
def test_h10_python_objects_in_yaml(parts, tmp_path, place):
    canary = tmp_path / "X"
    text = f"!!python/object/apply:os.system ['touch {canary}']"
    if place == "value":
        assert_in(error_of(f"--partition=[{text}]"), "--partition", "wrong value")
    else:
        file = tmp_path / "run.yaml"
        file.write_text(f"batch-size: 4\nseed: {text}\n")
        assert_in(error_of("--config", file), str(file), "not plain YAML", "line 2")
    assert not canary.exists()


# -- H11: words of a shell in paths ------------------------------------------------------------

NASTY = "a; touch X1 $(touch X2) `touch X3` & | > X4\n#'\""
# stands for the python of a recipe: writes down its words
FAKE = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"$WORDS"\n'


@pytest.mark.parametrize("recipe", ["train_pp.sh", "export.sh"])
def test_h11_recipes_pass_words_on_as_they_are(tmp_path, recipe):
    root = tmp_path / NASTY
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "requirements.lock", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o700)
    mark_ready(root / ".venv", root=root)
    names = ("MODEL_PATH", "OUTPUT_PATH", "CONFIG_PATH", "DATASET_PATH")
    environment = {
        **{name: value for name, value in os.environ.items() if "STAGELINE" not in name},
        **dict.fromkeys(names, NASTY),
        "WORDS": str(tmp_path / "words"),
    }
    done = subprocess.run(
        ["bash", str(root / "scripts" / recipe), "--output-dir", NASTY],
        cwd=root, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().split("\0")
    assert words[0].startswith(f"{root}/") and words[-3:] == ["--output-dir", NASTY, ""]
    made = [name for folder in (tmp_path, root) for name in os.listdir(folder)]
    assert [name for name in made if name.startswith("X")] == []


def test_h11_paths_are_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NASTY
    folder.mkdir()
    job = Job(folder)
    options = ("--total-steps", 1, "--save-steps", 1, "--lora.target", "q_proj")
    finished = job.fork(NASTY, *options, ranks=1)
    assert finished.code == 0, finished.err
    assert job.checkpoints(NASTY) == ["step-00000001"]
    again = job.fork("again", "--config", folder / NASTY / "config.yaml", ranks=1)
    assert again.code == 0, again.err
    assert sorted(os.listdir(tmp_path)) == [NASTY]
    assert [name for name in os.listdir(folder) if name.startswith("X")] == []
