"""NaN and infinity: weights stay unharmed, all ranks agree, and the message names the place."""

import json
import math
from pathlib import Path

import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training.nonfinite import Skips
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import Job, assert_same_tensors, saved_tensors
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

PARTS = Path(__file__).with_name("faulty_parts.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a job with an undisturbed run `whole`."""
    job = Job(tmp_path_factory.mktemp("job"))
    job.train("whole", *SHORT)
    return job


SHORT = ("--total-steps", 3, "--save-steps", 1)


def checkpoint(job, name, step):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


def records(job, name):
    return {record["step"]: record for record in job.records(name)}


FAULTS = {
    "f01": (
        "at=loss,rank=1,step=1,count=2,do=value",
        ["the loss is nan in micro-batch 1 (rows "],
    ),
    "f02": (
        "at=gradient,rank=0,step=1,do=value",
        ["model.embed_tokens.weight (stage 0, rank 0)", "inf", "1 of 21"],
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_stops_at_the_first_before_the_update(job, case):
    chaos, words = FAULTS[case]
    ended = job.fork(case, *SHORT, "--bad-steps.max_skipped", 1, chaos=chaos)
    assert ended.code == 6 and ended.seconds < 30
    words = [*words, "step 2 was skipped", "checkpoints are as they were"]
    for word in [*words, "--bad-steps.max_skipped"]:
        assert word in ended.err
    assert job.checkpoints(case) == ["step-00000001"]
    assert_same_tensors(checkpoint(job, case, 1), checkpoint(job, "whole", 1))
    record = records(job, case)[2]
    rows = record["trouble"]["rows"]
    assert record["is_skipped"] and len(set(rows)) == 8
    if case == "f01":
        told = f"(rows {', '.join(map(str, rows[4:]))})"
        assert told in record["trouble"]["problem"], "those of micro-batch 1"


def test_f01_on_one_of_two_replicas(job):
    options = ("--num-stages", 1, "--dp-degree", 2, "--bad-steps.max_skipped", 1)
    ended = job.fork("replica", *options, chaos="at=loss,rank=1,step=1,do=value")
    assert ended.code == 6
    assert "the loss is nan in micro-batch 0" in ended.err and "of replica 1" in ended.err
    assert len(set(records(job, "replica")[2]["trouble"]["rows"])) == 16, "rows of both"


def test_f03_f05_a_skipped_step_is_counted_and_changes_nothing(job):
    """It is logged whatever the interval, with its nan."""
    faults = [f"at=loss,rank=1,step={step},do=value" for step in (1, 3, 4)]
    options = ("--total-steps", 6, "--save-steps", 1, "--log-steps", 6)
    ended = job.fork("skip", *options, chaos=";".join(faults))
    assert ended.code == 0, ended.err
    told = records(job, "skip")
    assert {step: told[step]["is_skipped"] for step in told} == {1: 0, 2: 1, 4: 1, 5: 1, 6: 0}
    assert told[5]["loss"] is None and told[5]["non_finite"]["loss"] == "nan"
    counts = [told[step]["trouble"] for step in (2, 4, 5)]
    assert [(count["skipped_in_a_row"], count["num_skipped"]) for count in counts] == [
        (1, 1),
        (1, 2),
        (2, 3),
    ]
    assert "step 5/6: skipped, no weight changed (2 in a row, 3 in all)" in ended.out
    assert "the loss is nan" in ended.out
    for before, after in ((1, 2), (3, 4), (4, 5)):
        assert_same_tensors(*(checkpoint(job, "skip", step) for step in (before, after)))
    moved = [saved_tensors(checkpoint(job, "skip", step)) for step in (5, 6)]
    assert not torch.equal(*(tensors["/model.norm.weight"] for tensors in moved))


def test_f04_a_micro_batch_without_targets_weighs_nothing(job, tmp_path):
    rows = job.rows.read_text().splitlines()[:7]
    # none of its tokens is in the loss
    silent = json.dumps({"id": "7", "question": "?", "answer": "!" * 30})
    for name, lines in (("with", [*rows, silent]), ("without", rows)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        size = ("--batch-size", len(lines), "--micro-batch-size", 1, "--total-steps", 2)
        data = ("--dataset-path", tmp_path / name, "--import", PARTS, "--collate-fn", "silent")
        job.train(name, *size, *data, "--dataset.test_size", 0)
    ours, theirs = job.losses("with"), job.losses("without")
    assert all(math.isfinite(loss) for loss in ours.values())
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-6)
    told = records(job, "with")[1], records(job, "without")[1]
    assert told[0]["num_targets"] == told[1]["num_targets"]
    assert told[0]["num_samples"] == told[1]["num_samples"] == 7


def test_f06_a_spike(job):
    options = ("--total-steps", 18, "--save-steps", 17)
    options += ("--bad-steps.spike_sigma", 6, "--bad-steps.spike_action", "skip")
    ended = job.fork("spike", *options, ranks=1, chaos="at=spike,step=17,do=value")
    assert ended.code == 0, ended.err
    told = records(job, "spike")
    assert "is a spike, more than 6 standard deviations" in told[18]["trouble"]["problem"]
    assert [step for step in told if "trouble" in told[step]] == [18]
    assert told[18]["is_skipped"]
    assert_same_tensors(*(checkpoint(job, "spike", step) for step in (17, 18)))


def test_f06_a_resumed_run_decides_the_same():
    losses = [2.0 + 0.01 * (step % 7) for step in range(30)] + [2.2, 2.0, math.nan, 2.2, 3.0]
    straight = Skips(spike_sigma=4, spike_action="skip")
    whole = [straight.judge(loss, 0.0, 1.0) for loss in losses]
    assert {verdict.is_skipped for verdict in whole[:30]} == {False}
    assert [verdict.is_skipped for verdict in whole[30:]] == [True, False, True, True, True]
    for cut in (10, 20, 31, 33):
        first = Skips(spike_sigma=4, spike_action="skip")
        for loss in losses[:cut]:
            first.judge(loss, 0.0, 1.0)
        second = Skips(spike_sigma=4, spike_action="skip")
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [second.judge(loss, 0.0, 1.0) for loss in losses[cut:]] == whole[cut:]
        assert second.state_dict() == straight.state_dict()


def test_f08_a_stage_that_learns_nothing_is_named_once(job):
    faults = [f"at=zero_gradient,rank=1,step={step},do=value" for step in (1, 2)]
    ended = job.fork("zero", "--total-steps", 3, chaos=";".join(faults))
    assert ended.code == 0, ended.err
    assert ended.out.count("all gradients of stage 1 are zero") == 1
    assert "all gradients of stage 0" not in ended.out
    assert [step for step, r in records(job, "zero").items() if "warnings" in r] == [2]


# -- without the entry file ------------------------------------------------------------------


def build(rank, num_ranks, **options):
    stage = CausalLMStage(tiny_config("llama"), stage=rank, num_stages=num_ranks)
    init_split_model(stage, seed=1, device="cpu", dtype=torch.float32)
    stage.frozen()
    stage.train()
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    return TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=1e-2),
        learning_rate=lambda step: 1e-2,
        **options,
    )


def skip_one(rank, num_ranks):
    """Steps with a good batch, a bad one, a good one; the bad one is the row that starts with 5."""

    def loss_fn(logits, batch, *, num_targets):
        loss = sft(logits, batch, num_targets=num_targets)
        if "loss_is_bad" not in batch:
            return loss
        return loss + (logits.sum() * 0).sqrt()  # its value is 0, its derivative nan

    step = build(rank, num_ranks, loss_fn=loss_fn)
    batches = [dict(batch) for batch in tiny_micro_batches("llama")]
    for index, batch in enumerate(batches):
        batch["loss_rows"] = torch.arange(len(batch["input_ids"])) + 10 * index
    bad = [dict(batch) for batch in batches]
    bad[1]["loss_is_bad"] = torch.ones(1)
    results = [step(batches if index != 1 else bad, step=index) for index in range(3)]
    return [[r.loss, r.is_skipped, r.problem or "", list(r.rows)] for r in results]


def test_f02_all_stages_skip_together_and_know_the_micro_batch():
    results = run_ranks(skip_one, 2, 2)
    assert results[0] == results[1]
    good, bad, again = results[0]
    assert [good[1], bad[1], again[1]] == [False, True, False]
    assert "micro-batch 1 (rows 10, 11" in bad[2] and bad[3][0] == 0
    assert math.isfinite(bad[0]), "finite, and skipped all the same"
    assert "lm_head.weight (stage 1, rank 1)" in bad[2]


def bad_module(rank, num_ranks, name, place):
    """Return the report of a step in which one module of stage 1, or two in turn, return nan."""
    step = build(rank, num_ranks, loss_fn=sft)
    model = step.runner.local.models[0]
    spoilt = {
        "inside": {name: lambda output: output * math.nan},
        "hidden": {name: lambda output: output * math.nan, "": lambda output: output.nan_to_num()},
    }[place]
    for path, change in spoilt.items() if rank == 1 else ():
        module = model.get_submodule(path)
        module.register_forward_hook(lambda *given, change=change: change(given[2]))
    return step(tiny_micro_batches("llama"), step=0).problem


def test_the_first_module_with_a_bad_output_is_named():
    name = "model.layers.3.mlp.act_fn"
    problems = run_ranks(bad_module, 2, 2, name, "inside")
    assert problems[0] == problems[1]
    assert f"what {name} returned on stage 1 was first bad in micro-batch 0" in problems[0]
    hidden = run_ranks(bad_module, 2, 2, name, "hidden")[0] or ""
    assert f"what {name}" not in hidden, "it came out of no stage"
