"""Cases A10-A13 and A19, and G28: ranks that hang, are stopped, or lose their launcher or helpers.

The timeout of an exchange is 600 s, and a process that is stopped costs torchrun 30 s more: both
would be noticed.
"""

import re
import time

import pytest

from stageline import progress
from stageline.checkpoint.layout import verify
from tests.helpers.small_run import Job
from tests.helpers.warm_start import launch, live_processes

LIMIT = ("--hang-timeout", 3, "--sync-save")
SECONDS = 30  # the contract is the limit and 10 s; a slow machine may take longer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("hangs"))


def assert_kept(job, name, *steps):
    """The checkpoints of these steps are there, and whole."""
    assert job.checkpoints(name) == [f"step-{step:08d}" for step in steps]
    for checkpoint in job.checkpoints(name):
        verify(job.folder / name / "checkpoints" / checkpoint)


def stacks(job, name):
    """Rank -> stacks that were written."""
    files = (job.folder / name / "failures").glob("rank-*.log")
    return {
        int(file.stem.removeprefix("rank-")): file.read_text()
        for file in files
        if file.stat().st_size
    }


def workers_of(launcher):
    """Live processes that this one has started."""
    return {pid for pid, parent in live_processes().items() if parent == launcher}


def test_a10_a_rank_that_sleeps_for_ever_is_named(job):
    done = job.fork("a10", *LIMIT, chaos="at=forward,rank=0,step=3,do=hang")
    assert done.code == 8 and done.seconds < SECONDS
    (line,) = done.err.strip().splitlines()
    place = "step=3: no progress for \\d s in forward of micro-batch 0 on stage 0"
    assert re.match(rf"error\[hang\] rank=0 stage=0 {place} \(", line)
    assert "--hang-timeout 3" in line
    assert_kept(job, "a10", 2)
    assert "in _hang" in stacks(job, "a10")[0]


def test_a10_a_lone_process_is_looked_after_too(job):
    done = job.fork("a10_1", *LIMIT, ranks=1, chaos="at=forward,step=3,do=hang")
    assert done.code == 8 and done.seconds < SECONDS
    assert re.match(r"error\[hang\] step=3: no progress for \d s in forward of micro", done.err)
    assert_kept(job, "a10_1", 2)


def test_a10_the_start_has_no_limit(job, monkeypatch):
    # forks must not inherit the place that this process reached before
    monkeypatch.setattr(progress, "_place", progress.Progress(step=3, since=0.0))
    chaos = "at=start,rank=1,do=sleep,value=4"
    done = job.fork("a10_start", "--hang-timeout", 3, "--total-steps", 2, chaos=chaos)
    assert (done.code, done.err) == (0, "")


def test_a12_a_rank_that_holds_the_lock_is_killed(job):
    """The one that waits for it reports what it waits for."""
    # long enough that the watchdog of the rank has looked before it cannot any more
    looked = "at=step,rank=1,step=2,do=sleep,value=2"
    done = job.fork("a12", *LIMIT, chaos=f"{looked};at=forward,rank=1,step=3,do=hold_gil")
    assert done.code == 8 and done.seconds < SECONDS
    first = done.err.strip().splitlines()[0]
    assert first.startswith("error[hang] rank=0 stage=0 step=3: no progress for ")
    assert "waiting for gradients of micro-batch 0 on stage 0" in first
    assert_kept(job, "a12", 2)
    assert sorted(stacks(job, "a12")) == [0, 1], "C code keeps no process from writing them"


def test_a11_below_the_launcher_there_are_no_30_s_more(job):
    run = launch(
        *(job, "a11_launched", "--num-stages", 2, *LIMIT),
        chaos="at=forward,rank=1,step=3,do=sigstop",
    )
    log = job.folder / "a11_launched" / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert run.poll() is None
        time.sleep(0.1)
    workers = workers_of(run.pid)
    assert len(workers) == 2
    began = time.monotonic()
    done = run.finish()
    assert done.code == 8, done.err
    assert time.monotonic() - began < SECONDS
    assert done.err.startswith("error[hang] rank=0 stage=0 step=3: no progress for ")
    assert_kept(job, "a11_launched", 2)
    assert sorted(stacks(job, "a11_launched")) == [0]
    assert not workers & live_processes().keys()


def test_a13_a_helper_that_hangs_is_named_as_data(job):
    options = (*LIMIT, "--num-workers", 1)
    done = job.fork("a13", *options, chaos="at=loader,rank=1,count=4,do=hang")
    assert done.code == 8 and done.seconds < SECONDS
    first = done.err.strip().splitlines()[0]
    assert re.match(r"error\[hang\] rank=1 stage=1 step=\d: no progress for \d s in data \(", first)
    assert_kept(job, "a13", 2)


def test_g28_a_helper_that_is_killed_is_named(job):
    done = job.fork(
        "g28", "--sync-save", "--num-workers", 1, chaos="at=loader,rank=1,count=4,do=sigkill"
    )
    assert done.code in (3, 9), done.err
    assert done.seconds < SECONDS
    assert re.search(r"DataLoader worker \(pid.* \d+\) (is killed by signal|exited unex)", done.err)
    assert_kept(job, "g28", 2)
