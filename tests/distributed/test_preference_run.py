"""Preferences through the entry file: resumed runs, replicas, what the rows bring, refusals."""

import json
import shutil

import pytest

from tests.helpers.small_run import Job
from tests.helpers.tiny_datasets import write_lines, write_preferences

LORA = ("--llm-lora-num", 1, "--parts.lm_head.frozen", "--lora.dropout", 0.2)
DPO = "--collate-fn dpo --loss-fn dpo --total-steps 5 --save-steps 3".split()
TWO = ("--dp-degree", 2, "--dp-shard", "--num-stages", 1)
KTO = "--collate-fn kto --loss-fn kto --prompt-fn chat --total-steps 2".split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    write_preferences(folder)
    columns = {"ref_chosen_logps": -40.0, "ref_rejected_logps": -40.0}
    pairs = map(json.loads, (folder / "dpo.jsonl").open())
    write_lines(folder / "columns.jsonl", [row | columns for row in pairs])
    return Job(folder, num_layers=4)


def run(job, name, words, *options, file="dpo.jsonl", **more):
    return job.fork(name, *words, "--dataset-path", job.folder / file, *options, **more)


def records(job, name, kind):
    return {record["step"]: record for record in job.records(name, kind)}


@pytest.mark.parametrize(
    ("name", "options", "mode"),
    [
        ("lora", LORA, "adapters_off"),
        ("full", (), "precompute"),
        ("begun", LORA, "precompute"),  # from an adapter: it belongs to the start
    ],
)
def test_the_reference_is_that_of_the_start_in_a_resumed_run(job, name, options, mode):
    whole, parts = f"{name} whole", f"{name} parts"
    if name == "begun":
        first = ("--learning-rate", 0.05, "--total-steps", 2)
        assert (done := run(job, "first", DPO, *LORA, *first, ranks=1)).code == 0, done.err
        checkpoint = job.folder / "first" / "checkpoints" / "step-00000002"
        options = (*options, "--adapter-path", checkpoint, "--lora.dropout", 0)
    held_out = ("--eval-samples", 4, "--save-best", "loss", *options)
    assert (done := run(job, whole, DPO, *held_out, ranks=1)).code == 0, done.err
    assert f"reference of the loss: {mode}" in done.out
    shutil.copytree(job.folder / whole, job.folder / parts, symlinks=True)
    shutil.rmtree(job.folder / parts / "checkpoints" / "step-00000005")
    if name == "full":
        shutil.copytree(job.folder / parts, job.folder / "lost", symlinks=True)
        shutil.rmtree(job.folder / "lost" / "reference")
        done = run(job, "lost", DPO, *held_out, "--resume", "auto", ranks=1)
        assert done.code == 2 and "another start model" in done.err
    done = run(job, parts, DPO, *held_out, "--resume", "auto", ranks=2)
    assert done.code == 0 and "3 of 5 steps are done" in done.out, done.err
    assert "computing log-probabilities" not in done.out
    steps, wanted = records(job, parts, "train"), records(job, whole, "train")
    assert steps[1]["reward_margin"] == 0 and steps[5]["reward_margin"] != 0
    for step, record in wanted.items():
        assert record["num_samples"] == 8
        for figure in ("loss", "reward_margin", "rewards_chosen", "grad_norm"):
            assert steps[step][figure] == pytest.approx(record[figure], rel=1e-4, abs=1e-6), step
    assert {0, 5} <= records(job, whole, "eval").keys()
    last = records(job, parts, "eval")[5], records(job, whole, "eval")[5]
    assert last[0]["reward_accuracy"] == last[1]["reward_accuracy"]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], rel=1e-5)


def test_replicas_share_the_work_of_the_reference(job):
    """The baseline of KTO and the rows of the table come from both of them."""
    options = ("--eval-samples", 3, "--batch-size")
    one = run(job, "kto one", KTO, *options, 8, ranks=1, file="kto.jsonl")
    two = run(job, "kto two", KTO, *TWO, *options, 4, file="kto.jsonl")
    assert one.code == 0 and two.code == 0, one.err + two.err
    for kind in ("train", "eval"):
        ours, wanted = records(job, "kto two", kind), records(job, "kto one", kind)
        for step, record in wanted.items():
            for figure in ("loss", "reward_margin", "kl"):
                assert ours[step][figure] == pytest.approx(record[figure], rel=1e-4, abs=1e-6)
    assert records(job, "kto one", "train")[2]["kl"] > 0


def test_rows_bring_the_reference(job):
    done = run(job, "columns", DPO, "--total-steps", 1, ranks=1, file="columns.jsonl")
    assert done.code == 0 and "reference of the loss: columns" in done.out, done.err
    assert records(job, "columns", "train")[1]["rewards_chosen"] != 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--reference", "adapters_off"), "is trained besides adapters"),
        (("--reference", "columns"), "bring no log-probabilities for micro-batch 0"),
        (("--logits-chunk", 8), "--logits-chunk needs a sum over target tokens"),
        (("--packing",), "--packing needs a --collate-fn"),
        (("--collate-fn", "kto"), "'label' is missing"),
    ],
)
def test_what_cannot_be_combined(job, options, wanted):
    done = run(job, "refused", DPO, *options, ranks=1)
    assert done.code in (2, 3) and wanted in done.err, done.err
