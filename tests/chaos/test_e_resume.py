"""Resuming is exact: the same losses, weights, optimizer state and samples as without a stop."""

from pathlib import Path

import pytest
import torch

from tests.helpers.small_run import Job, saved_tensors

STEPS = 12
KILL = "at=step,step={},do=sigkill"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_layers=4)


@pytest.fixture(scope="module")
def straight(job):
    """A run without a stop, on one stage, with a checkpoint after each step."""
    done = job.fork("straight", "--save-steps", 1, ranks=1)
    assert done.code == 0, done.err
    return job.folder / "straight" / "checkpoints"


def assert_same(ours: Path, theirs: Path) -> None:
    """The same checkpoint, to the bit, however it is divided into files."""
    mine, expected = saved_tensors(ours), saved_tensors(theirs)
    assert mine.keys() == expected.keys()
    assert [name for name in mine if not torch.equal(mine[name], expected[name])] == []


def last(job, name):
    return job.folder / name / "checkpoints" / f"step-{STEPS:08d}"


@pytest.mark.parametrize("step", [1, 4, STEPS - 1])
def test_e01_e03_resumed_after_a_step(step, job, straight):
    """Resumed after the first and last steps, within an epoch, and at its end (E3)."""
    name = f"from-{step}"
    done = job.fork(name, "--resume", straight / f"step-{step:08d}", "--save-steps", 6, ranks=1)
    assert done.code == 0, done.err
    expected = job.losses("straight")
    assert job.losses(name) == {k: v for k, v in expected.items() if k > step}
    assert_same(last(job, name), last(job, "straight"))


OPTIONS = {
    "e04_data_workers_and_packing": ("--num-workers", 2, "--packing"),
    "e05_e06_accumulation_and_warm_up": (
        *("--accumulate-steps", 2, "--batch-size", 4, "--gradient-checkpointing"),
        *("--warmup-steps", 5, "--weight-decay", 0.3, "--max-grad-norm", 0.5),
    ),
    "e07_lora_with_dropout": ("--llm-lora-num", 1, "--lora.dropout", 0.3),
    "e13_bf16_masters": ("--bf16",),
    "e13_fp16_scale": ("--fp16",),
    "muon": ("--optimizer", "muon"),
    "adafactor": ("--optimizer", "adafactor"),
    "adamw_8bit": ("--optimizer", "adamw_8bit"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_resumed_with_options(case, job):
    """Killed at step 7, resumed from 6: equal to a run that was not."""
    options = OPTIONS[case]
    whole, parts = f"{case}-whole", f"{case}-parts"
    assert job.fork(whole, *options, ranks=1).code == 0
    assert job.fork(parts, *options, ranks=1, chaos=KILL.format(7), waits=True).code != 0
    done = job.fork(parts, *options, "--resume", "auto", ranks=1)
    assert done.code == 0 and "6 of 12 steps are done" in done.out, done.err
    assert job.losses(parts) == job.losses(whole)
    assert_same(last(job, parts), last(job, whole))


def test_e08_other_intervals_change_nothing(job, straight):
    """Evaluation, log and checkpoint intervals are no part of the course."""
    done = job.fork(
        "intervals",
        *("--eval-samples", 4, "--eval-steps", 3, "--save-steps", 5, "--log-steps", 2),
        ranks=1,
    )
    assert done.code == 0, done.err
    expected = job.losses("straight")
    assert job.losses("intervals").items() <= expected.items()
    assert_same(last(job, "intervals"), last(job, "straight"))


def test_d12_two_stages_then_four_then_one_and_back(job, straight):
    """Resumed on another number of stages and another schedule each time; moments by name."""
    for ranks, step, options in (
        (2, 3, ()),
        (4, 5, ("--schedule", "gpipe")),
        (1, 7, ()),
        (2, 9, ("--num-stages", 4, "--stages-per-rank", 2, "--schedule", "interleaved_1f1b")),
    ):
        resume = ("--resume", "auto") if step > 3 else ()
        done = job.fork(
            "moves", *resume, *options, ranks=ranks, chaos=KILL.format(step), waits=True
        )
        assert done.code != 0
    zbv = ("--num-stages", 4, "--schedule", "zbv", "--stages-per-rank", 2)
    done = job.fork("moves", "--resume", "auto", *zbv, ranks=2)
    assert done.code == 0, done.err
    assert job.losses("moves") == job.losses("straight")
    assert_same(last(job, "moves"), last(job, "straight"))


def assert_close(ours: Path, theirs: Path, rtol: float) -> None:
    mine, expected = saved_tensors(ours), saved_tensors(theirs)
    assert mine.keys() == expected.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], expected[name], rtol=rtol, atol=1e-6, msg=name)


@pytest.mark.parametrize("shards", [False, True], ids=["replicated", "sharded"])
def test_d12_replicas_come_and_go(shards, job):
    """One process, then two replicas, then one: the same samples, losses equal but for rounding."""
    order = ("--rows.order", "given")
    assert job.fork(f"alone-{shards}", *order, ranks=1).code == 0
    name = f"replicas-{shards}"
    two = ("--num-stages", 1, "--dp-degree", 2, "--batch-size", 4, *["--dp-shard"][: int(shards)])
    assert job.fork(name, *order, ranks=1, chaos=KILL.format(3), waits=True).code != 0
    again = job.fork(name, *order, *two, "--resume", "auto", chaos=KILL.format(7), waits=True)
    assert "2 of 12 steps are done" in again.out, again.err
    done = job.fork(name, *order, "--resume", "auto", ranks=1)
    assert done.code == 0 and "6 of 12" in done.out, done.err
    expected = job.losses(f"alone-{shards}")
    assert job.losses(name) == pytest.approx(expected, rel=1e-5)
    assert_close(last(job, name), last(job, f"alone-{shards}"), rtol=1e-3)


def test_lora_on_lora(job):
    """A second adapter on a first one: killed and resumed on another number of stages."""
    assert job.fork("first", "--llm-lora-num", 1, ranks=1).code == 0
    options = ("--model-path", last(job, "first"), "--llm-lora-num", 2)
    options += ("--processor-path", job.model, "--config-path", job.model)
    assert job.fork("second", *options, ranks=1).code == 0
    assert job.fork("second-parts", *options, ranks=2, chaos=KILL.format(7), waits=True).code != 0
    done = job.fork("second-parts", *options, "--resume", "auto", ranks=1)
    assert done.code == 0, done.err
    assert job.losses("second-parts") == job.losses("second")
    assert_same(last(job, "second-parts"), last(job, "second"))
