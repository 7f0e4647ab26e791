"""The run log: files are parsed back by other programs' readers."""

import errno
import json
import math
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stageline.run_records import finite
from stageline.training.evaluation import EvalResult
from stageline.training.run_log import RunLog, StepRecord


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Curves take a second each: only where a test looks at them."""
    if "curve" not in request.node.name:
        monkeypatch.setattr(RunLog, "draw", Mock())


def record(step, loss=1.0, **other):
    figures = dict(
        learning_rate=0.5,
        grad_norm=2.0,
        num_tokens=300,
        num_targets=30,
        num_samples=3,
        seconds=0.5,
        peak_memory_bytes=(2**30, 2**29),
    )
    return StepRecord(step=step, loss=loss, **{**figures, **other})


def write_log(folder, losses, *, first=1, total=None, **options):
    log = RunLog(folder, total_steps=total or first + len(losses) - 1, **options)
    for step, loss in enumerate(losses, start=first):
        log.log_step(record(step, loss))
    log.log_eval(step, {"loss": 0.5, "token_accuracy": 0.25})
    log.close()
    return log


def read_lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_events(folder, name):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_line_holds_all_figures_of_a_step(tmp_path):
    write_log(tmp_path, [3.0, 2.0])
    lines = read_lines(tmp_path)
    assert [(line["kind"], line["step"], line["loss"]) for line in lines] == [
        ("train", 1, 3.0),
        ("train", 2, 2.0),
        ("eval", 2, 0.5),
    ]
    assert lines[0] == {
        "kind": "train",
        "step": 1,
        "time": lines[0]["time"],
        "loss": 3.0,
        "grad_norm": 2.0,
        "lr": 0.5,
        "num_tokens": 300,
        "num_targets": 30,
        "num_samples": 3,
        "tok/s": 600.0,
        "seconds": 0.5,
        "data_wait": 0.0,
        "is_skipped": False,
        "peak_memory_bytes": [2**30, 2**29],
    }
    assert lines[2]["token_accuracy"] == 0.25


def test_the_router_loss_is_shown_where_there_is_one(tmp_path):
    assert "router" not in str(record(1)) and "router_loss" not in record(1).logged()
    with_router = record(1, extra_loss=0.125)
    assert str(with_router).startswith("loss 1.0000 | router_loss 0.1250 | ")
    log = RunLog(tmp_path, total_steps=1)
    log.log_step(with_router)
    log.close()
    assert read_lines(tmp_path)[0]["router_loss"] == 0.125
    assert read_events(tmp_path, "train/router_loss") == [(1, 0.125)]


def test_only_every_so_many_steps_are_written_when_asked(tmp_path):
    write_log(tmp_path, [float(step) for step in range(1, 12)], log_steps=4)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 4, 8, 11, 11]
    assert [step for step, _ in read_events(tmp_path, "train/loss")] == [1, 4, 8, 11]


def test_what_is_not_finite_is_null_and_says_what_it_was(tmp_path):
    write_log(tmp_path, [math.nan, math.inf, 1.0])
    text = (tmp_path / "log.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text  # JSON has neither
    first, second, third, _ = read_lines(tmp_path)
    assert first["loss"] is None and first["non_finite"] == {"loss": "nan"}
    assert second["loss"] is None and second["non_finite"] == {"loss": "inf"}
    assert third["loss"] == 1.0 and "non_finite" not in third
    assert finite({"norm": -math.inf})["non_finite"] == {"norm": "-inf"}


def test_tensorboard_reads_the_same_figures(tmp_path):
    write_log(tmp_path, [3.0, 2.5])
    assert read_events(tmp_path, "train/loss") == [(1, 3.0), (2, 2.5)]
    assert read_events(tmp_path, "eval/token_accuracy") == [(2, 0.25)]
    assert read_events(tmp_path, "train/peak_memory_bytes/rank_1") == [(1, 2**29), (2, 2**29)]


def test_a_continued_log_appends_and_the_events_of_lost_steps_go(tmp_path):
    write_log(tmp_path, [4.0, 3.0, 2.0])
    before = (tmp_path / "log.jsonl").read_bytes()
    time.sleep(1.1)  # files of events are read in the order of their names, which have seconds
    write_log(tmp_path, [2.5], first=2, start_step=1)
    after = (tmp_path / "log.jsonl").read_bytes()
    assert after.startswith(before) and len(read_lines(tmp_path)) == 7
    marks = [line["step"] for line in read_lines(tmp_path) if line["kind"] == "resume"]
    assert marks == [1], "where steps are there twice, the later ones count"
    assert read_events(tmp_path, "train/loss") == [(1, 4.0), (2, 2.5)]


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path):
    write_log(tmp_path, [4.0])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write_log(tmp_path, [3.0], first=2, start_step=1)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "eval", "resume", "train", "eval"]
    assert lines[3]["loss"] == 3.0


def test_events_that_cannot_be_written_do_not_end_a_run(tmp_path, capsys):
    log = RunLog(tmp_path, total_steps=3)
    full = OSError(errno.ENOSPC, "No space left on device")
    log._listeners["to TensorBoard"] = SimpleNamespace(
        log=Mock(side_effect=full), close=Mock(side_effect=full)
    )
    log.log_step(record(1))
    log.log_step(record(2))
    log.close()
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]
    said = capsys.readouterr().out
    assert said.count("no more figures go to TensorBoard") == 1 and "No space left" in said
    assert str(tmp_path) in said
    log = RunLog(tmp_path, total_steps=3)
    log._listeners["to TensorBoard"] = SimpleNamespace(close=Mock(side_effect=full))
    log.close()


def test_the_curve_is_drawn_at_an_evaluation_and_at_the_end(tmp_path):
    log = RunLog(tmp_path, total_steps=2)
    log.log_step(record(1))
    assert not (tmp_path / "loss.png").exists()
    log.log_eval(1, {"loss": 1.0})
    Image.open(tmp_path / "loss.png").verify()
    (tmp_path / "loss.png").unlink()
    log.close()
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (800, 600)
    log.close()  # twice is allowed: on the way out of an error too


def test_held_out_samples_are_kept_with_their_ids(tmp_path):
    context = SimpleNamespace(is_main=True, rank=0, device=None, pp_group=None)
    rows = [
        (None, {"id": f"row {n}", "question": "q", "answer": answer})
        for n, answer in enumerate("abc")
    ]
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(ids))
    result = EvalResult(1.0, 0.5, 3, predicted=[["a"], [], ["x"]])  # the second: another rank's
    with RunLog(tmp_path, context=context, total_steps=5) as report:
        report.evaluated(2, result, dataset=rows, processor=tokenizer)
    lines = (tmp_path / "samples/step-00000002.md").read_text().splitlines()
    assert lines[0] == "1 wrong of 2." and len(lines) == 6
    assert lines[4].startswith("| row 0 | right |") and lines[5].startswith("| row 2 | wrong |")


def test_without_tensorboard_a_note_and_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write_log(tmp_path, [1.0])
    assert "pip install tensorboard" in capsys.readouterr().err
    assert len(read_lines(tmp_path)) == 2 and not (tmp_path / "tensorboard").exists()


def test_troubles_are_said_and_logged_whatever_the_interval(tmp_path, capsys):
    log = RunLog(tmp_path, total_steps=100, log_steps=50)
    for step in range(1, 8):
        log.log_step(record(step))
    bad = {"problem": "the loss is nan", "rows": (3, 7), "skipped_in_a_row": 2, "num_skipped": 5}
    log.log_step(record(8, math.nan, is_skipped=True, **bad))
    log.log_step(record(9, problem="a spike", rows=(1,)))
    log.log_step(record(10, warnings=("stage 1 learns nothing",)))
    log.close()
    lines = {line["step"]: line for line in read_lines(tmp_path)}
    assert sorted(lines) == [1, 8, 9, 10]
    assert lines[8]["trouble"] == {
        "problem": "the loss is nan",
        "rows": [3, 7],
        "skipped_in_a_row": 2,
        "num_skipped": 5,
    }
    assert lines[8]["is_skipped"] and lines[8]["non_finite"] == {"loss": "nan"}
    assert lines[9]["trouble"]["problem"] == "a spike" and not lines[9]["is_skipped"]
    assert lines[9]["trouble"]["rows"] == [1] and "trouble" not in lines[10]
    assert lines[10]["warnings"] == ["stage 1 learns nothing"]
    out = capsys.readouterr().out
    for line in (
        "step 8/100: skipped, no weight changed (2 in a row, 5 in all): the loss is nan",
        "step 9/100: a spike",
        "step 10/100: stage 1 learns nothing",
    ):
        assert line in out


def test_a_line_says_when_the_time_goes_into_waiting_for_data(tmp_path, capsys):
    log = RunLog(tmp_path, total_steps=4)
    for step, wait in enumerate((0.02, 0.2, 0.0, 0.5), start=1):
        log.log_step(record(step, data_wait=wait))
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert ["data_wait 40%" in lines[1], "data_wait 100%" in lines[3]] == [True, True]
    assert "data_wait" not in lines[0] + lines[2], "4 % is nothing to tell"
    assert [line["data_wait"] for line in read_lines(tmp_path)] == [0.02, 0.2, 0.0, 0.5]


def test_the_share_is_of_the_steps_since_the_last_line(tmp_path, capsys):
    log = RunLog(tmp_path, total_steps=200)  # a line every 5 steps
    for step in range(1, 11):
        log.log_step(record(step, data_wait=0.4 if step == 3 else 0.0))
    log.close()
    first, fifth, tenth = capsys.readouterr().out.splitlines()
    assert "data_wait 20%" in fifth and "data_wait" not in first + tenth
