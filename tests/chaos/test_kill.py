"""Ranks that are killed at random moments: the run continues as if nothing had happened.

Some kills for each day; benchmarks/kill_test.py does fifty, by hand or below torchrun.
"""

from collections import Counter

import pytest

from stageline.distributed import failure
from tests.helpers.killing import (
    Killer,
    LaunchedRun,
    RunFolder,
    kill_below_launcher,
    kill_by_hand,
    last_tensors,
)
from tests.helpers.small_run import Job
from tests.helpers.warm_start import WarmLauncher, live_processes

TOTAL_STEPS = 20
KILLS = 4
OPTIONS = ("--total-steps", TOTAL_STEPS, "--save-steps", 2, "--keep-last", 3)
# stages, whether saving waits, data workers: of the restarts in turn
WAYS = [(2, False, 0), (1, False, 0), (2, True, 1)]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("kill"))
    finished = made.fork("whole", *OPTIONS)
    assert finished.code == 0, finished
    return made


def assert_same_run(job: Job, name: str) -> None:
    tensors, expected = (
        last_tensors(RunFolder(job.folder / run), TOTAL_STEPS) for run in (name, "whole")
    )
    assert len(tensors) == 4  # weights and state of two ranks
    assert tensors == expected
    losses = job.losses(name)
    assert sorted(losses) == list(range(1, TOTAL_STEPS + 1))
    assert losses == job.losses("whole")


def test_kills_by_hand_leave_the_same_run(job, monkeypatch):
    # a killed rank tells no cause: nothing is lost by not waiting for one
    monkeypatch.setattr(failure, "SECONDS_FOR_THE_CAUSE", 0.2)
    folder = RunFolder(job.folder / "killed")

    def start(count: int):
        stages, waits, workers = WAYS[count % len(WAYS)] if count < KILLS else WAYS[0]
        more = ("--sync-save",) if waits else ()
        return job.start_forked(
            "killed", *OPTIONS, "--resume", "auto", "--num-workers", workers, *more, ranks=stages
        )

    killer = Killer(1, folder, total_steps=TOTAL_STEPS, seconds_to_start=1.0)
    kill_by_hand(start, killer, kills=KILLS)
    assert_same_run(job, "killed")
    phases = Counter(kill.phase for kill in killer.done)
    print(phases, max(kill.seconds_down for kill in killer.done))
    assert sum(phases.values()) == KILLS and {"start", "step", "write"} <= set(phases)
    assert not list(folder.checkpoints.glob("*.tmp-*"))


class WarmRun(LaunchedRun):
    """Torchrun itself, whose workers are forks; they begin in the order of their ranks."""

    def __init__(self, words, output, *, num_ranks):
        self.num_ranks, self.before = num_ranks, set()
        self.process = WarmLauncher(words[1:], {"OMP_NUM_THREADS": "1"}, output=output)

    @property
    def pids(self):
        live = live_processes()
        return dict(enumerate(sorted(p for p in live if live[p] == self.process.pid)))


def test_kills_below_torchrun_leave_the_same_run(job):
    words = job.command(
        *("torchrun", *OPTIONS, "--num-stages", 2, "--resume", "auto"),
        torchrun=(2, "--max-restarts", 4),
    )
    folder = RunFolder(job.folder / "torchrun")
    run = WarmRun(words, job.folder / "torchrun.txt", num_ranks=2)
    killer = Killer(2, folder, total_steps=TOTAL_STEPS, seconds_to_start=1.0)
    kill_below_launcher(run, killer, kills=2)
    assert_same_run(job, "torchrun")
    assert not (job.folder / "torchrun" / "failure.json").exists(), "the last attempt was good"
    print(*killer.done, sep="\n")
