"""`--engine streaming` through the entry file: equal to a pipeline, exact to resume, refusals."""

import pytest

from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import Job, assert_same_tensors

STEPS = 4
OPTIONS = ("--total-steps", STEPS, "--save-steps", 2)
STREAMING = ("--engine", "streaming", "--num-stages", 4, *OPTIONS)
ADAPTERS = ("--llm-lora-num", 1, "--lora.dropout", 0.1, "--parts.lm_head.frozen")
KILL = "at=step,step=3,do=sigkill"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_layers=4, tied=True)


def assert_same(job, ours, theirs):
    """The same losses and the same last checkpoint, to the bit."""
    assert job.losses(ours) == job.losses(theirs)
    last = f"checkpoints/step-{STEPS:08d}"
    assert_same_tensors(job.folder / ours / last, job.folder / theirs / last)


@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["tied", "adapters"])
def test_a_run_equals_that_of_a_pipeline(job, options):
    name = f"{len(options)}"
    job.train(f"pipeline-{name}", *OPTIONS, *options, "--eval-samples", 8, ranks=2)
    more = ("--streaming.stages", 1, "--eval-samples", 8)
    done = job.train(f"streaming-{name}", *STREAMING, *options, *more, ranks=1)
    assert "streaming: 4 stages in host memory through cpu" in done.out
    assert_same(job, f"streaming-{name}", f"pipeline-{name}")


@pytest.mark.parametrize("options", [(), ("--stale-step", "--bf16")], ids=str)
def test_a_killed_run_resumes_to_the_same_bits(job, options):
    name = "resumed" + "".join(options)
    assert job.fork(f"straight{name}", *STREAMING, *options, ranks=1).code == 0
    killed = job.fork(name, *STREAMING, *options, ranks=1, chaos=KILL, waits=True)
    assert killed.code != 0 and job.checkpoints(name)[-1] == "step-00000002"
    done = job.train(name, *STREAMING, *options, "--resume", "auto", ranks=1)
    assert "2 of 4 steps are done" in done.out
    assert_same(job, name, f"straight{name}")


def test_stages_are_as_many_as_decoder_layers(job):
    done = run_entry(job.command("alone", "--engine", "streaming", "--total-steps", 1)[1:])
    assert done.returncode == 0, done.stderr
    assert "streaming: 4 stages" in done.stdout


REFUSED = {
    "--schedule gpipe": "does not go with --engine streaming",
    "--compile-layers": "does not go with --engine streaming",
    "--streaming.budget 0.00001": "layer 0 needs",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(job, words):
    done = job.fork("refused", *STREAMING, *words.split(), ranks=1)
    assert done.code == 2
    assert REFUSED[words] in done.err and words.split()[0] in done.err, done.err
