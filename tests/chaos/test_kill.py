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
ANSWERING_STEPS, ANSWERING_KILLS = 12, 2
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
    print(*killer.done, sep="\n")


def test_kills_between_answers_and_updates_leave_the_same_run(tmp_path, monkeypatch):
    """Get the same answers, byte by byte, in a run whose model answers before each step."""
    monkeypatch.setattr(failure, "SECONDS_FOR_THE_CAUSE", 0.2)
    job = Job(tmp_path)
    words = (
        "--collate-fn grpo --reward length --reward.length.longest 8 --reward.length.margin 8 "
        "--rollouts.group_size 4 --rollouts.max_completion_length 8 --rollouts.inner_steps 2 "
        "--rollouts.sampling_temperature 2 "
    ).split()
    options = (*OPTIONS, *words, "--total-steps", ANSWERING_STEPS)
    whole = job.fork("whole", *options)
    assert whole.code == 0, whole
    folder = RunFolder(job.folder / "killed")

    def start(count: int):
        return job.start_forked("killed", *options, "--resume", "auto")

    killer = Killer(3, folder, total_steps=ANSWERING_STEPS, seconds_to_start=1.0)
    kill_by_hand(start, killer, kills=ANSWERING_KILLS)
    tensors, expected = (
        last_tensors(RunFolder(job.folder / run), ANSWERING_STEPS) for run in ("killed", "whole")
    )
    assert len(tensors) == 4 and tensors == expected
    answers, wanted = (
        (job.folder / run / "samples.jsonl").read_bytes() for run in ("killed", "whole")
    )
    assert answers == wanted and answers.count(b"\n") == 2 * ANSWERING_STEPS // 2
    assert job.losses("killed") == job.losses("whole")
    print(*killer.done, sep="\n")
