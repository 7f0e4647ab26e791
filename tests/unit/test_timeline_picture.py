"""The picture, the trace and the words of a timeline agree with its events."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from stageline.pipeline.recorder import WAITS, TimelineEvent, bubble, describe_timeline, split_waits
from stageline.plotting.figures import timeline_figure
from stageline.training.run_log import RunLog
from stageline.training.step import StepResult
from stageline.training.timeline import StepTimeline, write_trace

# two ranks, two micro-batches, the second stage slower; times do not start at 0
MEASURED = [
    TimelineEvent(0, 0, "F", 0, 10.0, 11.0),
    TimelineEvent(0, 0, "F", 1, 11.0, 12.0),
    TimelineEvent(0, 0, "wait", 0, 13.0, 14.0),
    TimelineEvent(0, 0, "B", 0, 14.0, 15.0),
    TimelineEvent(0, 0, "wait", 1, 15.0, 17.0),
    TimelineEvent(0, 0, "B", 1, 17.0, 18.0),
    TimelineEvent(1, 1, "wait", 0, 10.5, 11.0),
    TimelineEvent(1, 1, "F", 0, 11.0, 12.5),
    TimelineEvent(1, 1, "I", 0, 12.5, 14.0),
    TimelineEvent(1, 1, "F", 1, 14.0, 15.5),
    TimelineEvent(1, 1, "I", 1, 15.5, 17.0),
    TimelineEvent(1, 1, "W", 0, 17.0, 17.5),
]
MEASURED_BUSY = 4.0 + 6.5
MEASURED_BUBBLE = 1 - MEASURED_BUSY / (2 * 8.0)
IDEAL = [
    TimelineEvent(0, 0, "F", 0, 0.0, 1.0),
    TimelineEvent(0, 0, "B", 0, 3.0, 5.0),
    TimelineEvent(1, 1, "F", 0, 1.0, 2.0),
    TimelineEvent(1, 1, "B", 0, 2.0, 3.0),
]
IDEAL_BUBBLE = 1 - 5.0 / (2 * 5.0)
TWO_STAGES_A_RANK = [
    TimelineEvent(0, 0, "F", 0, 0.0, 1.0),
    TimelineEvent(1, 1, "F", 0, 1.0, 2.0),
    TimelineEvent(0, 2, "F", 0, 2.0, 3.0),
    TimelineEvent(1, 3, "F", 0, 3.0, 4.0),
]


# -- the picture -------------------------------------------------------------------------


def test_the_bubble_stands_above_each_panel():
    upper, lower = timeline_figure(MEASURED, IDEAL, title="x").axes
    assert upper.get_title("left") == f"measured — bubble {100 * MEASURED_BUBBLE:.1f} %, 8 s"
    assert lower.get_title("left").startswith("ideal")
    assert f"bubble {100 * IDEAL_BUBBLE:.1f} %, 5 s" in lower.get_title("left")


# -- the trace ---------------------------------------------------------------------------


def test_the_trace_holds_each_span_in_microseconds(tmp_path):
    write_trace(MEASURED, tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {
        (
            event["pid"],
            event["args"]["stage"],
            event["args"]["kind"],
            event["args"]["micro_batch"],
            event["ts"],
            event["dur"],
        )
        for event in spans
    }
    assert found == {
        (e.rank, e.stage, e.kind, e.micro_batch, (e.start - 10) * 1e6, (e.end - e.start) * 1e6)
        for e in MEASURED
    }
    assert {event["name"] for event in spans} >= {"forward 1", "weight gradient 0"}
    assert {event["cat"] for event in spans} == {"compute", "wait"}


def test_spans_of_a_thread_do_not_cross(tmp_path):
    """Viewers nest spans of one thread; two that overlap in part are drawn wrong."""
    last = {}
    write_trace(MEASURED, tmp_path / "t.json")
    for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            assert event["ts"] >= last.get(thread, 0.0)
            last[thread] = event["ts"] + event["dur"]


# -- in words ----------------------------------------------------------------------------


def test_the_description_gives_bubbles_times_and_the_slowest_stage():
    lines = describe_timeline(MEASURED, IDEAL).splitlines()
    assert lines == [
        "bubble 34.4 % of 8.000 s; ideal with these pass times: 50.0 % of 5.000 s",
        "rank 0 (stage 0): busy 4.000 s, waits 3.000 s for other stages, 0.000 s for transfers",
        "rank 1 (stage 1): busy 6.500 s, waits 0.500 s for other stages, 0.000 s for transfers",
        "stage 1 is the slowest, 24 % above the mean: if it has several layers, move one to "
        "stage 0 (--partition)",
    ]


def test_the_description_blames_nobody_where_stages_are_even():
    text = describe_timeline(TWO_STAGES_A_RANK, None)
    assert "ideal" not in text and "move" not in text
    assert "rank 0 (stages 0, 2): busy 2.000 s" in text
    assert "slowest" not in text
    alone = [TimelineEvent(0, 0, "F", 0, 0.0, 1.0)]
    assert "slowest" not in describe_timeline(alone, None), "one stage is not slower than others"
    still = [TimelineEvent(rank, rank, "F", 0, 1.0, 1.0) for rank in (0, 1)]
    assert describe_timeline(still, still).startswith("bubble 0.0 %")
    assert describe_timeline([], None) == "bubble 0.0 % of 0.000 s"


# -- waits -------------------------------------------------------------------------------


def parts_of(events):
    """Return (rank, stage, micro-batch) of a wait -> its parts."""
    found = {}
    for event in split_waits(events):
        if event.kind in WAITS:
            place = (event.rank, event.stage, event.micro_batch)
            found.setdefault(place, []).append((event.kind, event.start, event.end))
    return found


def test_a_wait_is_cut_where_the_tensor_was_made():
    events = [
        TimelineEvent(0, 0, "F", 0, 0.0, 2.0),
        TimelineEvent(1, 1, "wait", 0, 0.5, 2.5),  # 1.5 s until it is made, 0.5 s until it is there
        TimelineEvent(1, 1, "F", 0, 2.5, 3.0),
        TimelineEvent(1, 1, "B", 0, 3.0, 5.0),
        TimelineEvent(0, 0, "wait", 0, 5.5, 6.0),  # it was made before: all of it is the transfer
        TimelineEvent(0, 0, "B", 0, 6.0, 7.0),
    ]
    assert parts_of(events) == {
        (1, 1, 0): [("wait", 0.5, 2.0), ("transfer", 2.0, 2.5)],
        (0, 0, 0): [("transfer", 5.5, 6.0)],
    }
    lines = describe_timeline(split_waits(events), None).splitlines()
    assert lines[1].endswith("busy 3.000 s, waits 0.000 s for other stages, 0.500 s for transfers")
    assert lines[2].endswith("busy 2.500 s, waits 1.500 s for other stages, 0.500 s for transfers")
    assert bubble(split_waits(events)) == bubble(events), "both are bubble"


def test_forward_and_backward_waits_of_a_micro_batch_have_other_makers():
    """Two stages a rank: the gradient comes from the stage behind, by an input-gradient pass."""
    events = [
        TimelineEvent(0, 0, "F", 1, 0.0, 1.0),
        TimelineEvent(1, 1, "wait", 1, 0.0, 3.0),
        TimelineEvent(1, 1, "F", 1, 3.0, 4.0),
        TimelineEvent(0, 2, "I", 1, 8.0, 9.0),
        TimelineEvent(0, 2, "W", 1, 9.0, 9.5),  # sends nothing
        TimelineEvent(1, 1, "wait", 1, 6.0, 9.2),
        TimelineEvent(1, 1, "I", 1, 9.2, 10.0),
    ]
    waits = [("wait", 0.0, 1.0), ("transfer", 1.0, 3.0), ("wait", 6.0, 9.0), ("transfer", 9.0, 9.2)]
    assert parts_of(events) == {(1, 1, 1): waits}


def test_a_wait_whose_maker_is_not_known_stays():
    events = [TimelineEvent(1, 1, "wait", 0, 0.0, 1.0), TimelineEvent(1, 1, "F", 0, 1.0, 2.0)]
    assert split_waits(events) == events and split_waits(events[:1]) == events[:1]


@pytest.mark.parametrize(("step", "num_ranks", "timed"), [
    (2, 2, [2, 9, 19]), (-1, 2, []), (2, 1, [2]), (9, 2, [9, 19]),
])  # fmt: skip
def test_the_bubble_is_measured_every_tenth_step(step, num_ranks, timed):
    runner = SimpleNamespace(
        device=torch.device("cpu"), pp_rank=0, schedule=SimpleNamespace(num_ranks=num_ranks)
    )
    timeline = StepTimeline(runner, step=step)
    assert [step for step in range(25) if timeline.is_timed(step)] == timed


# -- in a run ----------------------------------------------------------------------------


def test_the_memory_of_a_run_that_goes_on_is_told_from_its_first_line(tmp_path, capsys):
    context = SimpleNamespace(is_main=True, rank=0, devices=[torch.device("cpu")], pp_group=None)
    figures = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1}
    counts = {"num_tokens": 1, "num_targets": 1, "num_samples": 1}
    with RunLog(tmp_path / "run", context=context, total_steps=25, start_step=21) as report:
        report.stepped(22, StepResult(**figures, **counts), 1.0)
    shown = capsys.readouterr().out
    assert "step 22/25" in shown and re.search(r"mem \d", shown), shown


@pytest.mark.parametrize("is_main", [True, False])
def test_a_run_keeps_picture_and_trace_in_its_folder(is_main, tmp_path, capsys):
    context = SimpleNamespace(is_main=is_main, rank=0, device=None, pp_group=None)
    with RunLog(tmp_path / "run", context=context, total_steps=5) as report:
        report.timeline(3, MEASURED, IDEAL)
        report.timeline(3, [], None)  # nothing was recorded: nothing is replaced
    shown = capsys.readouterr().out
    if not is_main:
        assert not (tmp_path / "run").exists() and shown == ""
        return
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"timeline.png", "timeline.json"} <= names
    assert "timeline of step 3: bubble 34.4 %" in shown
