"""Chaos, group A: a rank fails in training. One report names it, no rank waits, nothing is lost."""

import json
from pathlib import Path

import pytest

from commands import train as train_pp  # noqa: F401 - its engines, before a fixture keeps registers as they are
from tests.helpers.small_run import Finished, Job

PARTS = Path(__file__).with_name("faulty_parts.py")
SECONDS = 30  # ten after the fault are promised; the machine may be slow

# saved in the background a checkpoint may be unfinished when a rank is killed: --sync-save
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def name(request):
    """Return the name of the run folder of this test."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)


def told(job: Job, name: str) -> dict:
    return json.loads((job.folder / name / "failure.json").read_text())


def assert_reported(done: Finished, line: str, *words: str, code: int = 9) -> None:
    """Check that stderr begins and ends with one line, without a traceback of any rank."""
    assert done.code == code, done.err
    lines = done.err.splitlines()
    assert lines[0].startswith(line), done.err
    assert lines[-1] == lines[0] and done.err.count("error[") == 1
    for word in words:
        assert word in lines[0]
    assert "Traceback" not in done.err and "onnection" not in done.err
    assert done.seconds < SECONDS


def assert_kept(job: Job, name: str, steps: int) -> None:
    """The checkpoint of that step is whole: each file that its manifest names is there."""
    assert job.checkpoints(name)[-1] == f"step-{steps:08d}"
    for folder in (job.folder / name / "checkpoints").iterdir():
        assert (folder / "manifest.json").is_file(), "half a checkpoint"
        assert list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("at", "rank"),
    [
        pytest.param("loss", 1, id="a05_loss"),
        pytest.param("evaluation", 0, id="a18_evaluation"),
    ],
)
def test_an_exception_names_its_rank_and_place(job, name, at, rank):
    options = ("--eval-samples", 4, "--eval-steps", 3) if at == "evaluation" else ()
    done = job.fork(name, "--sync-save", *options, chaos=f"at={at},rank={rank},step=3,do=raise")
    line = f"error[crash] rank={rank} stage={rank} step="
    assert_reported(done, line, "a fault was asked for", f"in {at}")
    record = told(job, name)
    step = 2 if at == "evaluation" else 3
    assert (record["rank"], record["stage"], record["kind"]) == (rank, rank, "crash")
    assert record["step"] in (step, 3) and record["operation"] == at
    assert "InjectedError" in record["traceback"] and record["host"]
    assert "InjectedError" in Path(record["log"]).read_text()
    assert record["log"] in done.err
    assert_kept(job, name, 2)


def test_a09_an_early_sys_exit_is_an_error(job, name):
    done = job.fork(name, "--sync-save", chaos="at=forward,rank=1,step=3,do=sys_exit,value=0")
    assert_reported(done, "error[crash] rank=1 stage=1 step=3: ", "sys.exit(0) was called")
    assert_kept(job, name, 2)


def test_a15_a_fault_before_the_ranks_have_met(job, name):
    done = job.fork(name, "--sync-save", chaos="at=start,rank=1,do=raise")
    assert_reported(done, "error[crash] rank=1: ", "a fault was asked for")
    assert job.checkpoints(name) == []


@pytest.mark.parametrize(("do", "index"), [("ragged", 2), ("other_tokens", 0)])
def test_a20_other_micro_batches_on_a_rank_are_refused(job, name, do, index, monkeypatch):
    monkeypatch.setenv("FAULTS", json.dumps({"1": {"step": 2, "do": do}}))
    options = ("--import", PARTS, "--collate-fn", "faulty", "--micro-batch-size", 2)
    done = job.fork(name, "--sync-save", *options)
    assert_reported(done, "error[data] ", f"micro-batches {index} of one step", "on rank 0", code=3)
    assert ("contents" if do == "other_tokens" else "input_ids (2, ") in done.err
    assert told(job, name)["step"] == 2
    assert_kept(job, name, 2)
    assert len(job.losses(name)) == 2  # nothing was computed on the wrong data


def test_a21_stages_of_different_types_are_refused_when_they_are_built(job, name):
    done = job.fork(name, "--sync-save", "--import", PARTS, "--train-model", "two_dtypes")
    assert_reported(done, "error[usage]: stage 0 sends ", "float32", "bfloat16", code=2)
    assert not (job.folder / name / "failure.json").exists()  # a wrong option, not a failed run


def test_f09_a_full_device_is_told_with_what_fills_it(job, name):
    options = ("--gradient-checkpointing", "--micro-batch-size", 2)
    done = job.fork(name, "--sync-save", *options, chaos="at=forward,rank=1,step=3,count=2,do=oom")
    line = "error[memory] rank=1 stage=1 step=3: out of memory in forward of micro-batch 1"
    parts = ("It has 2 x ", "weights", "gradients", "optimizer state", "activations", "the peak")
    assert_reported(done, line, *parts, "a smaller --micro-batch-size (now 2)", code=7)
    remedies = done.err.partition("What helps: ")[2].split(";")
    assert len(remedies) == 3 and "--gradient-checkpointing" not in done.err
    assert told(job, name)["kind"] == "memory"
    assert_kept(job, name, 2)


def test_f10_memory_of_the_host_is_told_in_bytes(job, name, monkeypatch):
    monkeypatch.setenv("FAULTS", json.dumps({"1": {"step": 3, "do": "fill_memory"}}))
    done = job.fork(name, "--sync-save", "--import", PARTS, "--collate-fn", "faulty")
    assert_reported(done, "error[memory] rank=1 stage=1", f"({3 * 2**30} bytes)", code=7)
    assert_kept(job, name, 2)
