"""Who is to blame when nothing goes on: pure functions over what the ranks told last."""

import os
import subprocess
import sys

import pytest
import torch

from stageline import progress
from stageline.distributed import stop
from stageline.distributed.guard import SECONDS_OF_SILENCE, Beat, Watcher, blame, describe
from stageline.distributed.stop import Process
from stageline.pipeline.plan import parse_action
from stageline.progress import Progress
from stageline.training import step as step_module

LIMIT = 10.0


def beat(rank, operation="forward", *, age, waits=False, number=1):
    place = Progress(operation, 3, rank, 2, waits)
    return Beat(rank, number, "host", 0, (rank,), Process(rank, 100 + rank, 7, 5), place, age)


def beats(*given):
    return {b.rank: b for b in given}


def test_a_beat_comes_back_from_the_store_as_it_was():
    sent = beat(1, age=2.5)
    assert Beat.from_json(sent.to_json()) == sent


def test_the_one_that_works_is_to_blame_not_the_older_waiter():
    told = beats(beat(0, age=12.0, waits=True), beat(1, age=11.0), beat(2, age=11.5, waits=True))
    verdict = blame(told, silent=set(), limit=LIMIT)
    assert (verdict.beat.rank, verdict.why) == (1, "busy")


def test_of_two_that_work_the_older_one():
    told = beats(beat(0, age=12.0), beat(1, age=14.0), beat(2, age=30.0, waits=True))
    assert blame(told, silent=set(), limit=LIMIT).beat.rank == 1


def test_a_silent_one_is_to_blame_whatever_the_others_do():
    told = beats(beat(0, age=50.0), beat(1, age=0.1, waits=True), beat(2, age=0.2))
    verdict = blame(told, silent={1}, limit=LIMIT)
    assert (verdict.beat.rank, verdict.why) == (1, "silent")


def test_of_silent_ones_the_one_that_did_not_wait():
    told = beats(beat(0, age=9.0, waits=True), beat(1, age=1.0), beat(2, age=5.0, waits=True))
    assert blame(told, silent={0, 1, 2}, limit=LIMIT).beat.rank == 1


def test_when_all_wait_the_one_that_waits_longest():
    told = beats(beat(0, age=10.5, waits=True), beat(1, age=12.0, waits=True))
    verdict = blame(told, silent=set(), limit=LIMIT)
    assert (verdict.beat.rank, verdict.why) == (1, "waiting")


def test_a_slow_rank_that_goes_on_is_no_hang():
    told = beats(beat(0, age=60.0, waits=True), beat(1, age=1.0))
    assert blame(told, silent=set(), limit=LIMIT) is None


def test_a_rank_that_has_just_begun_to_wait_worked_before():
    told = beats(beat(0, age=60.0, waits=True), beat(1, age=0.2, waits=True))
    assert blame(told, silent=set(), limit=LIMIT) is None


def test_nobody_is_judged_before_each_rank_has_shown_that_it_lives():
    watcher = Watcher(num_ranks=2, limit=LIMIT)
    first = beats(beat(0, age=12.0, waits=True), beat(1, age=11.0))
    assert watcher.see(first, now=0.0) is None
    assert watcher.see(first | beats(beat(1, age=11.5, number=2)), now=0.5) is None
    both = beats(beat(0, age=13.0, waits=True, number=2), beat(1, age=12.0, number=2))
    verdict = watcher.see(both, now=1.0)
    assert (verdict.beat.rank, verdict.why) == (1, "busy")


def test_a_rank_whose_beat_stands_still_is_silent_after_a_while():
    watcher = Watcher(num_ranks=2, limit=LIMIT)
    seen = [
        watcher.see(beats(beat(0, age=12.0 + n, waits=True, number=n), beat(1, age=2.0)), now=n)
        for n in range(int(SECONDS_OF_SILENCE) + 1)
    ]
    assert seen[:-1] == [None] * int(SECONDS_OF_SILENCE)
    assert (seen[-1].beat.rank, seen[-1].why) == (1, "silent")


def test_a_rank_that_never_beat_does_not_hinder_a_verdict():
    watcher = Watcher(num_ranks=2, limit=LIMIT)
    verdicts = [
        watcher.see(beats(beat(0, age=12.0 + n, number=n)), now=n)
        for n in range(int(SECONDS_OF_SILENCE) + 1)
    ]
    assert verdicts[-1].beat.rank == 0


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        (set(), "no progress for 11 s in forward of micro-batch 2 on stage 1 of rank 1"),
        ({1}, "no sign of life from rank 1 (process 101 on host), last in forward of micro-batch"),
    ],
)
def test_a_report_says_who_does_what_and_who_waits(silent, words):
    told = beats(beat(0, "gradients", age=12.0, waits=True), beat(1, age=11.0))
    text = describe(blame(told, silent=silent, limit=LIMIT), told)
    assert text.startswith(words)
    assert text.endswith("; rank 0 is waiting for gradients of micro-batch 2 on stage 0")


@pytest.fixture
def sleeper():
    stop._known.clear()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()
    stop._known.clear()


def _process(pid, rank=1):
    return Process(rank, pid, stop._state(pid)[1])


def test_a_neighbour_that_stays_is_killed(sleeper):
    process = _process(sleeper.pid)
    stop.remember([process])
    assert process.is_alive() and not stop.has_lost_one()
    assert stop.end_the_rest(seconds=0.1) == [1]
    assert sleeper.wait(10) == -9
    assert stop.has_lost_one()


def test_a_stranger_with_the_number_of_a_neighbour_is_let_alone(sleeper):
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("the system does not say when a process began")
    stop.remember([Process(1, sleeper.pid, started=1)])
    assert stop.end_the_rest(seconds=0.1) == []
    assert sleeper.poll() is None


class FakeEvent:
    """As torch's: recorded in the stream at once, reached when the device is there."""

    def __init__(self):
        self.is_reached = False

    def query(self):
        return self.is_reached


def test_a_gpu_that_is_behind_its_main_thread_tells_what_it_waits_for(monkeypatch):
    """Waits of NCCL return at once; the main thread stops later, at the first number it reads."""
    events = []
    monkeypatch.setattr(
        step_module, "recorded_event", lambda device: events.append(FakeEvent()) or events[-1]
    )
    progress.begin()
    progress.at_step(3)
    told = step_module.StepProgress(device=torch.device("cuda"))
    for word in ("1F0", "1F1"):
        with told.wait(parse_action(word)):
            pass
        with told.span(parse_action(word)):
            pass
    with progress.doing("optimizer"):
        seen = [str(progress.where())]
        for event in events:
            event.is_reached = True
            seen.append(str(progress.where()))
        assert progress.where() == progress.place()
    came, passed = "waiting for activations of micro-batch", "forward of micro-batch"
    assert seen == [
        "optimizer",
        *(f"{came} 0 on stage 1", "optimizer", f"{passed} 0 on stage 1", "optimizer"),
        *(f"{came} 1 on stage 1", "optimizer", f"{passed} 1 on stage 1", "optimizer"),
    ]


def test_a_main_thread_that_stopped_for_a_transfer_is_not_to_blame(monkeypatch):
    progress.begin()
    told = step_module.StepProgress(device=torch.device("cuda"))
    before, behind = FakeEvent(), FakeEvent()
    marks = iter((before, behind))
    told.mark = lambda: next(marks)
    with told.wait(parse_action("1B2")):
        pass
    before.is_reached = True  # and the device never comes through
    with progress.doing("optimizer"):
        place = progress.where()
    progress.begin()
    assert place.is_waiting and place.operation == "gradients"
    waits = Beat(1, 1, "host", 0, (1,), Process(1, 101, 7, 5), place, 30.0)
    verdict = blame(beats(waits, beat(0, age=12.0)), silent=set(), limit=LIMIT)
    assert (verdict.beat.rank, verdict.why) == (0, "busy")
