"""Answers in the run folder."""

import json

import pytest

from stageline.training.rollouts import SampleFile


def record(step):
    return {"step": step, "row": 1, "id": "a", "prompt": "\ud83d?", "answers": [{"text": "x"}]}


def write(file, steps):
    for step in steps:
        file(step, [record(step), record(step)])


@pytest.mark.parametrize("start_step", [0, 2])
def test_a_resumed_run_goes_on_behind_its_checkpoint(start_step, tmp_path):
    write(SampleFile(tmp_path, start_step=0), range(1, 5))
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [1, 1, 2, 2, 3, 3, 4, 4]
    with path.open("a") as file:
        file.write('{"step": 5, "answ')
    write(SampleFile(tmp_path, start_step=start_step), range(start_step + 1, 5))
    assert path.read_bytes() == whole
