"""Chaos: cards that are lost and come back. The run goes on by itself on those that are left.

A rank has a core here in the place of a card; `CardsInAFile` stands in for what tries them.
"""

import os
import signal
import time

import pytest

from stageline.distributed import elastic, failure, launch
from tests.helpers.killing import CardsInAFile
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch as start

pytestmark = pytest.mark.timeout(180)
STEPS = ("--total-steps", 14, "--save-steps", 4)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("elastic"), num_layers=4)
    whole = made.fork("whole", *STEPS)
    assert whole.code == 0, whole
    return made


@pytest.fixture
def cards(job, monkeypatch):
    """A file whose words are the cards that work."""
    CardsInAFile.file = job.folder / "cards.txt"
    CardsInAFile.file.unlink(missing_ok=True)
    for name in ("__init__", "usable"):  # of the class itself: a forked run has its own commands
        monkeypatch.setattr(elastic.Accelerators, name, getattr(CardsInAFile, name))
    monkeypatch.setattr(launch, "SECONDS_BETWEEN_LOOKS", 0.1)
    monkeypatch.setattr(failure, "SECONDS_FOR_THE_CAUSE", 0.2)
    return CardsInAFile.file


def wait_for_step(run, folder, step):
    log = folder / "log.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or f'"step": {step},' not in log.read_text():
        assert run.poll() is None and time.monotonic() < deadline, print(*run._told())
        time.sleep(0.01)


def lines_of(done):
    """What the launcher and the first rank have told of the restarts."""
    return [line for line in f"{done.err}\n{done.out}".splitlines() if line.startswith("elastic: ")]


def test_a_run_goes_on_with_three_of_four_cards_and_then_with_four(job, cards):
    cards.write_text("0 1 2")
    kill = "at=step,rank=3,step=6,do=sigkill"
    # slow enough that the card is back before the end
    slow = ";".join(f"at=step,rank=0,step={step},do=sleep,value=1" for step in (8, 9, 10))
    options = (*STEPS, "--num-stages", 4, "--elastic", "--sync-save")
    run = start(job, "cards", *options, chaos=f"{kill};{slow}")
    wait_for_step(run, job.folder / "cards", 7)
    cards.write_text("0 1 2 3")
    done = run.finish()
    assert done.code == 0, done
    told = lines_of(done)
    assert told[:3] == [
        "elastic: restart 1 of 10",
        "elastic: starts on 3 of 4 ranks, cards 0,1,2",
        "elastic: cards are back; everything was saved",
    ]
    three, four = (line for line in told if "went on" in line)
    assert "lost steps 5-6; went on from step 4 on 3 of 4 ranks (stages 3 x" in three
    assert "lost no step; went on from step " in four and "on 4 of 4 ranks (stages 4 x" in four
    assert job.losses("cards") == job.losses("whole")
    assert not (job.folder / "cards" / "failure.json").exists()


def test_replicas_a_torn_checkpoint_and_a_stop(job, cards, monkeypatch):
    """On three of 2 x 2 ranks one pipeline does the micro-batches of both."""
    folder, mark = job.folder / "replicas", job.folder / "torn"

    def tear(self, *, is_sure):
        if not is_sure:
            return ["0", "1", "2", "3"]
        if not mark.exists():  # between the starts nothing writes there
            mark.touch()
            newest = max((folder / "checkpoints").glob("step-????????"))
            torn = newest / "training_state" / "rank-00000.safetensors"
            torn.write_bytes(torn.read_bytes()[:-1])
        return ["0", "1", "2"]

    monkeypatch.setattr(elastic.Accelerators, "usable", tear)
    shape = ("--num-stages", 2, "--dp-degree", 2)
    whole = job.fork("whole_replicas", *STEPS, *shape, ranks=4)
    assert whole.code == 0, whole
    kill = "at=step,rank=3,step=10,do=sigkill"
    slow = ";".join(f"at=step,rank=2,step={step},do=sleep,value=1" for step in (11, 12))
    options = (*STEPS, *shape, "--elastic", "--sync-save")
    run = start(job, "replicas", *options, chaos=f"{kill};{slow}")
    wait_for_step(run, folder, 11)
    os.kill(run.pid, signal.SIGTERM)
    done = run.finish()
    assert done.code == 143, done
    assert "step-00000008" in done.out  # that it is torn, and set aside
    (went_on,) = (line for line in lines_of(done) if "went on" in line)
    assert "lost steps 5-10; went on from step 4 on 3 of 4 ranks (stages 3 x replicas 1)" in went_on
    assert sum("restart" in line for line in lines_of(done)) == 1
    losses, expected = job.losses("replicas"), job.losses("whole_replicas")
    assert 11 in losses and 14 not in losses
    assert losses == pytest.approx({step: expected[step] for step in losses}, abs=1e-6)
