"""The figures of docs/schedules.md, from a simulation of both orders."""

import re
from pathlib import Path

import pytest

from stageline.errors import UserError
from stageline.pipeline.schedules import SCHEDULES, check_micro_batches, ideal_bubble

DOCS = Path(__file__).resolve().parents[2] / "docs"


def order(schedule, *, stage, num_stages, num_micro_batches):
    """What a stage does, in order: ("F" or "B", micro-batch)."""
    forwards = [("F", index) for index in range(num_micro_batches)]
    backwards = [("B", index) for index in range(num_micro_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    warm_up = min(num_micro_batches, num_stages - stage)
    actions = forwards[:warm_up]
    for index in range(num_micro_batches):
        actions.append(backwards[index])
        actions += forwards[warm_up + index : warm_up + index + 1]
    return actions


def simulate(schedule, forward, backward, num_micro_batches):
    """(seconds of a step, most micro-batches that each stage keeps); no time between stages."""
    num_stages = len(forward)
    queues = [
        order(schedule, stage=stage, num_stages=num_stages, num_micro_batches=num_micro_batches)
        for stage in range(num_stages)
    ]
    done, clock = {}, [0.0] * num_stages
    kept, most = [0] * num_stages, [0] * num_stages
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, index = queue[0]
            neighbour = stage - 1 if kind == "F" else stage + 1
            if not 0 <= neighbour < num_stages:
                ready = 0.0 if kind == "F" else done["F", index, stage]
            elif (kind, index, neighbour) in done:
                ready = done[kind, index, neighbour]
            else:
                continue
            queue.pop(0)
            clock[stage] = max(clock[stage], ready)
            clock[stage] += (forward if kind == "F" else backward)[stage]
            done[kind, index, stage] = clock[stage]
            kept[stage] += 1 if kind == "F" else -1
            most[stage] = max(most[stage], kept[stage])
    return max(clock), most


CASES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 16, 32)]


@pytest.mark.parametrize("num_stages, num_micro_batches", CASES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_idle_share_and_memory_are_as_documented(schedule, num_stages, num_micro_batches):
    if schedule == "1f1b" and num_micro_batches < num_stages:
        pytest.skip("not allowed")
    seconds, most = simulate(schedule, [1.0] * num_stages, [2.0] * num_stages, num_micro_batches)
    busy = 3.0 * num_micro_batches
    assert seconds == pytest.approx(3.0 * (num_micro_batches + num_stages - 1))
    assert 1 - busy / seconds == pytest.approx(
        ideal_bubble(num_stages=num_stages, num_micro_batches=num_micro_batches)
    )
    assert most == [
        num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("times", [[1, 1, 2, 1], [3, 1, 1, 1], [1, 2], [1, 1, 1, 4]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_slowest_stage_sets_the_pace(schedule, times):
    num_micro_batches = 16
    seconds, _ = simulate(schedule, times, [2 * time for time in times], num_micro_batches)
    whole = [3 * time for time in times]
    documented = (num_micro_batches - 1) * max(whole) + sum(whole)
    if schedule == "gpipe":
        assert seconds == pytest.approx(documented)
    else:
        assert num_micro_batches * max(whole) <= seconds <= documented


@pytest.mark.parametrize("name", ["schedules.md", "schedules.zh.md"])
def test_the_table_of_the_guide(name):
    rows = re.findall(r"^\| (\d+) \| ([\d. %|]+) \|$", (DOCS / name).read_text(), re.MULTILINE)
    assert len(rows) >= 3
    for num_stages, cells in rows:
        shown = [float(cell) for cell in re.findall(r"([\d.]+) %", cells)]
        wanted = [
            100 * ideal_bubble(num_stages=int(num_stages), num_micro_batches=count)
            for count in (4, 8, 16, 32, 64)
        ]
        assert shown == pytest.approx(wanted, abs=0.051)


def test_both_guides_name_every_schedule():
    for name in ("schedules.md", "schedules.zh.md"):
        text = (DOCS / name).read_text()
        assert all(f"`{key}`" in text for key in SCHEDULES)


def test_too_few_micro_batches_are_refused():
    check_micro_batches("gpipe", num_micro_batches=1, num_stages=4)
    check_micro_batches("1f1b", num_micro_batches=4, num_stages=4)
    with pytest.raises(UserError, match="3 micro-batches can't fill 4 stages"):
        check_micro_batches("1f1b", num_micro_batches=3, num_stages=4)
    with pytest.raises(UserError, match="unknown"):
        check_micro_batches("zb", num_micro_batches=4, num_stages=4)
