"""`stageline train --model-path X --dataset-path rows.jsonl` is a whole command."""

import json

import pytest
import yaml

from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import Job
from tests.helpers.tiny_datasets import write_preferences

FEW = "--total-steps 2 --batch-size 2 --micro-batch-size 1 --max-token-num 64 --device cpu".split()
CHAT = {"prompt": "chat", "prompt-fn": "chat", "image-token": "auto", "dataset": "jsonl"}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("whole"))
    write_preferences(made.folder)
    return made


@pytest.mark.parametrize(
    ("file", "more", "keys"),
    [
        ("rows.jsonl", (), {"train-model": "llama", "loss-fn": "sft", "collate-fn": "sft"}),
        (
            "dpo.jsonl",
            ("--loss-fn", "rm"),
            {"train-model": "reward", "loss-fn": "rm", "collate-fn": "rm"},
        ),
    ],
)
def test_two_paths_are_enough(job, tmp_path, file, more, keys):
    words = ["--model-path", job.model, "--dataset-path", job.folder / file, *more, *FEW]
    entry = ["-m", "stageline", "train", *words, "--output-dir", tmp_path / "run"]
    done = run_entry([*map(str, entry)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {name: saved[name] for name in (*CHAT, *keys)} == CHAT | keys
    lines = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert sum(line["kind"] == "train" for line in lines) == 2


def test_an_architecture_without_a_part_is_refused(job, tmp_path):
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--config-path", tmp_path, "--dataset-path", job.rows, "--device", "cpu"]
    done = run_entry(["-m", "stageline", "train", *map(str, words)], cwd=tmp_path)
    assert done.returncode == 2
    assert "--train-model auto has no component for BertForMaskedLM" in done.stderr
