"""Cases B1-B9: signals that ask a run to save and stop."""

import os
import signal
import time

import pytest

from stageline.checkpoint.layout import verify
from tests.helpers.small_run import Job, assert_same_tensors
from tests.helpers.warm_start import launch

SECONDS = 30  # the contract is 10 s; a slow machine may take longer
SHORT = ("--total-steps", 6)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("preemption"))
    done = job.fork("straight", *SHORT)
    assert (done.code, done.err) == (0, ""), "nobody asked it to stop"
    return job


def assert_kept(job, name, *steps):
    """The checkpoints of these steps are there, whole, and nothing is half."""
    assert job.checkpoints(name) == [f"step-{step:08d}" for step in steps]
    folder = job.folder / name / "checkpoints"
    for checkpoint in job.checkpoints(name):
        assert verify(folder / checkpoint)["step"] == int(checkpoint.removeprefix("step-"))


def assert_goes_on_bitwise(job, name):
    """Check that the resumed run ends with the weights and losses of an undisturbed one."""
    job.train(name, *SHORT, "--resume", "auto")
    last = job.checkpoints("straight")[-1]
    assert_same_tensors(*(job.folder / run / "checkpoints" / last for run in (name, "straight")))
    assert job.losses("straight") == job.losses(name)


def test_b01_sigterm_to_the_launcher(job):
    """The run has done some steps; then rank 0 sleeps in the next one."""
    chaos = "at=forward,rank=0,step=3,do=sleep,value=2"
    run = launch(job, "b01", *SHORT, "--num-stages", 2, chaos=chaos)
    log = job.folder / "b01" / "log.jsonl"
    while not log.exists() or len(job.records("b01")) < 3:
        assert run.poll() is None, run.finish()
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGTERM)
    done = run.finish()
    assert done.code == 143, done.err
    told = "Stopping after this step; a second SIGTERM ends at once without saving."
    assert done.err.strip() == told
    assert_kept(job, "b01", 2, 4)


@pytest.mark.parametrize(("do", "rank"), [("sigterm", 0), ("sigusr1", 1), ("sigint", 0)])
def test_b02_b03_b07_a_signal_to_one_rank_in_a_step(job, do, rank):
    name = f"{do}_{rank}"
    done = job.fork(name, *SHORT, chaos=f"at=backward,rank={rank},step=2,do={do}")
    assert done.code == (130 if do == "sigint" else 143), done.err
    # rank 0 may be through before it hears why
    assert done.err.count("Stopping after this step") <= 1 and "error" not in done.err
    assert_kept(job, name, 2, 3)
    if do == "sigusr1":
        assert_goes_on_bitwise(job, name)


def test_b04_sigterm_during_a_save_lets_it_end(job):
    done = job.fork("b04", *SHORT, chaos="at=write,rank=1,count=2,do=sigterm")
    assert done.code == 143, done.err
    assert_kept(job, "b04", 2, 4, 5)


def test_b05_a_second_sigterm_ends_at_once(job):
    # the second comes during the step: rank 0 waits inside gloo
    faults = ("count=1,do=sigterm", "count=2,do=sleep,value=2", "count=3,do=sigterm")
    chaos = ";".join(f"at=forward,rank=1,step=3,{fault}" for fault in faults)
    options = (*SHORT, "--micro-batch-size", 2)
    done = job.fork("b05", *options, chaos=chaos + ";at=forward,rank=1,step=3,count=4,do=hang")
    assert done.code == 143 and done.seconds < SECONDS
    assert "Ended at once by a second SIGTERM, without saving" in done.err
    assert_kept(job, "b05", 2)


def test_b06_ranks_that_are_blocked_end_at_the_deadline(job):
    chaos = "at=forward,rank=0,step=3,do=sigterm;at=forward,rank=1,step=3,do=hang"
    done = job.fork("b06", *SHORT, "--stop-deadline", 2, chaos=chaos)
    assert done.code == 143 and done.seconds < SECONDS
    line = done.err.strip().splitlines()[-1]
    assert line.startswith("error[stopped] rank=")
    assert "step=3: SIGTERM asked for a stop 2 s" in line
    assert "The last checkpoint is what counts" in line
    assert_kept(job, "b06", 2)


def test_b08_sigterm_before_the_first_step(job):
    done = job.fork("b08", chaos="at=start,rank=1,do=sigterm")
    assert done.code == 143 and done.seconds < SECONDS
    assert done.err == "Stopped by SIGTERM before the first step; nothing was saved.\n"
    assert not (job.folder / "b08" / "checkpoints").exists()


def test_b09_sigkill_before_the_save_ends(job):
    # after step 3, where no save is due but the one that the signal asks for
    chaos = "at=forward,rank=1,step=2,do=sigterm;at=write,rank=1,count=2,do=sigkill"
    done = job.fork("b09", *SHORT, chaos=chaos)
    assert done.code not in (0, 130, 143) and done.seconds < SECONDS
    assert_kept(job, "b09", 2)
    assert_goes_on_bitwise(job, "b09")
