"""Runs by torch's own schedule classes: killed, resumed by our plan and back, and failing."""

import os
import signal
import time

import pytest

from stageline.pipeline.schedules import make_schedule
from tests.helpers.killing import RunFolder, last_tensors
from tests.helpers.small_run import Job

TOTAL_STEPS = 12
OPTIONS = ("--total-steps", TOTAL_STEPS, "--save-steps", 2, "--keep-last", 2)

# it fails only after the trial at the start
LOSS = """import time
from register import loss_fn_register
from loss_fn import sft

calls = []

@loss_fn_register('{name}', is_token_sum=True)
def {name}(logits, batch, *, num_targets):
    calls.append(1)
    if len(calls) > 40:
        {act}
    return sft(logits, batch, num_targets=num_targets)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("engines"), num_layers=4)
    finished = made.fork("whole", *OPTIONS)
    assert finished.code == 0, finished
    return made


def test_a_killed_run_goes_on_with_the_other_engine(job):
    name, folder = "killed", RunFolder(job.folder / "killed")
    run = job.start_forked(name, *OPTIONS, "--engine", "torch")
    while folder.newest() < 4 and run.is_running():
        time.sleep(0.001)
    os.kill(run.pids[1], signal.SIGKILL)
    assert run.wait().code != 0
    assert 4 <= folder.newest() < TOTAL_STEPS
    job.train(name, *OPTIONS, "--engine", "pipeline", "--resume", "auto")
    assert job.losses(name) == job.losses("whole")
    assert last_tensors(folder, TOTAL_STEPS) == last_tensors(
        RunFolder(job.folder / "whole"), TOTAL_STEPS
    )


def test_a_schedule_from_a_file_is_read_by_the_loader_of_torch(job):
    orders = make_schedule("1f1b", num_ranks=2).orders(4)
    rows = [",".join(map(str, order)) for order in orders]
    (job.folder / "mine.csv").write_text("\n".join(rows) + "\n")
    words = ("--engine", "torch", "--schedule", job.folder / "mine.csv")
    job.train("from-file", *OPTIONS, *words)
    assert job.losses("from-file") == job.losses("whole")


def test_a_schedule_that_torch_has_not_is_refused(job):
    finished = job.fork("eager", "--engine", "torch", "--schedule", "eager_1f1b")
    assert finished.code == 2
    assert "--schedule eager_1f1b is not one of PyTorch's" in finished.err.splitlines()[0]


def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(job):
    code = LOSS.format(name="hangs", act="time.sleep(1000)")
    (job.folder / "hanging.py").write_text(code)
    words = ("--engine", "torch", "--import", job.folder / "hanging.py", "--loss-fn", "hangs")
    finished = job.fork("hangs", *words, "--hang-timeout", 3)
    first = finished.err.splitlines()[0]
    for word in ("rank=1", "stage=1", "in loss of micro-batch"):
        assert word in first, finished.err
    assert finished.code != 0


def test_a_loss_that_raises_is_named_with_its_place_alone(job):
    """torch logs the whole schedule first, which is not to be seen."""
    code = LOSS.format(name="raises", act="raise KeyError('on purpose')")
    (job.folder / "raising.py").write_text(code)
    words = ("--engine", "torch", "--import", job.folder / "raising.py", "--loss-fn", "raises")
    finished = job.fork("raises", *words)
    assert finished.code not in (0, 2) and "Full Schedule" not in finished.err
    first = finished.err.splitlines()[0]
    for word in ("rank=1", "stage=1", "KeyError: 'on purpose'", "raising.py:11", "micro-batch"):
        assert word in first, finished.err
