"""Cases B1-B9: signals that ask a run to save and stop."""

import json
import os
import signal
import time

import pytest
from safetensors.torch import load_file

from options.train import RunConfig
from stageline.checkpoint.layout import verify
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch

SECONDS = 30  # the contract is 10 s; a slow machine may take longer
CAN_RESUME = hasattr(RunConfig, "resume")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("preemption"), num_layers=3)
    assert job.fork("straight").code == 0
    return job


def assert_kept(job, name, *steps):
    """The checkpoints of these steps are there, whole, and nothing is half."""
    assert job.checkpoints(name) == [f"step-{step:08d}" for step in steps]
    folder = job.folder / name / "checkpoints"
    for checkpoint in job.checkpoints(name):
        assert verify(folder / checkpoint)["step"] == int(checkpoint.removeprefix("step-"))


def assert_goes_on_bitwise(job, name):
    """Check that the resumed run ends with the weights and losses of an undisturbed one."""
    if not CAN_RESUME:
        return
    done = job.fork(name, "--resume", "auto")
    assert done.code == 0, done.err
    last = job.checkpoints("straight")[-1]
    straight, resumed = (
        {
            key: value
            for file in (job.folder / run / "checkpoints" / last).glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        for run in ("straight", name)
    )
    assert straight.keys() == resumed.keys()
    assert all(value.equal(resumed[key]) for key, value in straight.items())
    losses = job.losses("straight")
    assert {step: losses[step] for step in job.losses(name)} == job.losses(name)


def start_and_wait(job, name, *options, steps=3):
    """A run below a launcher that has done some steps; then rank 0 sleeps in the next one."""
    chaos = f"at=forward,rank=0,step={steps},do=sleep,value=2"
    run = launch(job, name, *options, chaos=chaos)
    log = job.folder / name / "log.jsonl"
    while not log.exists() or len(_trained(log)) < steps:
        assert run.poll() is None, run.finish()
        time.sleep(0.05)
    return run


def _trained(log):
    return [line for line in log.read_text().splitlines() if json.loads(line)["kind"] == "train"]


def test_b01_sigterm_to_the_launcher(job):
    run = start_and_wait(job, "b01", "--num-stages", 2)
    os.kill(run.pid, signal.SIGTERM)
    done = run.finish()
    assert done.code == 143, done.err
    assert done.err.strip() == (
        "Stopping after this step; a second SIGTERM ends at once without saving."
    )
    assert_kept(job, "b01", 2, 4)
    assert_goes_on_bitwise(job, "b01")


@pytest.mark.parametrize(("do", "rank"), [("sigterm", 0), ("sigusr1", 1), ("sigint", 0)])
def test_b02_b03_b07_a_signal_to_one_rank_in_a_step(job, do, rank):
    name = f"{do}_{rank}"
    done = job.fork(name, chaos=f"at=backward,rank={rank},step=4,do={do}")
    assert done.code == (130 if do == "sigint" else 143), done.err
    # rank 0 may be through before it hears why
    assert done.err.count("Stopping after this step") <= 1 and "error" not in done.err
    assert_kept(job, name, 2, 4, 5)
    assert_goes_on_bitwise(job, name)


def test_b04_sigterm_during_a_save_lets_it_end(job):
    done = job.fork("b04", chaos="at=write,rank=1,count=2,do=sigterm")
    assert done.code == 143, done.err
    assert_kept(job, "b04", 2, 4, 5)
    assert_goes_on_bitwise(job, "b04")


def test_b05_a_second_sigterm_ends_at_once(job):
    # the second comes during the step: rank 0 waits inside gloo
    faults = ("count=1,do=sigterm", "count=2,do=sleep,value=2", "count=3,do=sigterm")
    chaos = ";".join(f"at=forward,rank=1,step=3,{fault}" for fault in faults)
    done = job.fork("b05", chaos=chaos + ";at=forward,rank=1,step=3,count=4,do=hang")
    assert done.code == 143 and done.seconds < SECONDS
    assert "Ended at once by a second SIGTERM, without saving" in done.err
    assert_kept(job, "b05", 2)
    assert_goes_on_bitwise(job, "b05")


def test_b06_ranks_that_are_blocked_end_at_the_deadline(job):
    chaos = "at=forward,rank=0,step=3,do=sigterm;at=forward,rank=1,step=3,do=hang"
    done = job.fork("b06", "--stop-deadline", 2, chaos=chaos)
    assert done.code == 143 and done.seconds < SECONDS
    line = done.err.strip().splitlines()[-1]
    assert (
        line.startswith("error[stopped] rank=") and "step=3: SIGTERM asked for a stop 2 s" in line
    )
    assert "The last checkpoint is what counts" in line
    assert_kept(job, "b06", 2)
    assert_goes_on_bitwise(job, "b06")


def test_b08_sigterm_before_the_first_step(job):
    done = job.fork("b08", chaos="at=start,rank=1,do=sigterm")
    assert done.code == 143 and done.seconds < SECONDS
    assert done.err == "Stopped by SIGTERM before the first step; nothing was saved.\n"
    assert not (job.folder / "b08" / "checkpoints").exists()


def test_b09_sigkill_before_the_save_ends(job):
    # after step 3, where no save is due but the one that the signal asks for
    chaos = "at=forward,rank=1,step=2,do=sigterm;at=write,rank=1,count=2,do=sigkill"
    done = job.fork("b09", chaos=chaos)
    assert done.code not in (0, 130, 143) and done.seconds < SECONDS
    assert_kept(job, "b09", 2)
    assert_goes_on_bitwise(job, "b09")


def test_a_run_that_nobody_asks_to_stop_does_not_notice(job):
    done = job.fork("undisturbed")
    assert (done.code, done.err) == (0, "")
    assert job.losses("undisturbed") == job.losses("straight")
