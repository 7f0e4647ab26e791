"""Contrastive training over stages and replicas, held-out figures, resumed runs, bad groups."""

import json

import pytest
import torch

from loss_fn import cos, js
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training.evaluation import evaluate
from stageline.training.optimizers import optimizer_groups
from stageline.training.replicas import Replicas
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.shelf_losses import shelf_loss
from tests.helpers.small_run import Job
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_datasets import group_row, write_lines
from tests.helpers.tiny_models import tiny_config

SIZE = 3
CPU = torch.device("cpu")


def make_optimizer(parameters):
    if not parameters:
        return None
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=1e-2)


def build(stage, num_stages, dtype=torch.float32):
    model = CausalLMStage(tiny_config("llama"), stage=stage, num_stages=num_stages, dtype=dtype)
    init_split_model(model, seed=1, device="cpu", dtype=dtype)
    model.frozen()
    return model.train()


def make_batches():
    """Four micro-batches of one or two groups, of different lengths, with marks."""
    batches = []
    for index, batch in enumerate(tiny_micro_batches("llama", rows=2 * SIZE)):
        if index % 2:
            batch = {name: value[:SIZE] for name, value in batch.items()}
        batch["loss_marks"] = (batch["input_ids"] % 3 == 0) & (batch["labels"] != -100)
        count = len(batch["labels"]) // SIZE
        batch["loss_groups"] = torch.arange(count).repeat_interleave(SIZE)
        batches.append(batch)
    return batches


def loss_of(sim):
    sim_fn = {"js": js, "cos": cos}[sim]
    return shelf_loss("contrastive", sim_fn=sim_fn, warmup_steps=4, contrastive_weight=2.0)


def train(rank, num_stages, sim, dtype=torch.float32, schedule="1f1b", num_replicas=1):
    group = None
    runner_rank = rank
    if num_replicas > 1:  # stages on one rank each, replicas of one stage
        assert num_stages == 1
        group = torch.distributed.new_group([rank], use_local_synchronization=True)
        runner_rank = 0
    runner = PipelineRunner(
        build(runner_rank, num_stages, dtype), device=CPU, schedule=schedule, group=group
    )
    replicas = Replicas(torch.distributed.group.WORLD) if num_replicas > 1 else None
    step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=loss_of(sim),
        learning_rate=lambda step: 1e-2,
        replicas=replicas,
    )
    batches = make_batches()
    share = len(batches) // num_replicas
    own = batches[rank * share : (rank + 1) * share] if num_replicas > 1 else batches
    results = [step(own, step=index) for index in range(3)]
    held_out = evaluate(runner, [own[:1], own[1:]], loss_fn=loss_of(sim), step=2, replicas=replicas)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "figures": [result.figures for result in results],
        "held out": {"loss": held_out.loss, **held_out.figures},
        "weights": {n: p.detach().clone() for n, p in runner.local.named_parameters().items()},
    }


@pytest.mark.parametrize("sim", ["js", "cos"])
def test_two_stages_are_one_process_to_the_bit(sim):
    (one,) = run_ranks(train, 1, 1, sim)
    two = run_ranks(train, 2, 2, sim)
    for rank in two:
        for name in ("losses", "norms", "figures", "held out"):
            assert rank[name] == one[name], name
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, one["weights"][name]), name
    names = ["token_loss", "marked_loss", "contrastive_loss", "contrastive_accuracy"]
    assert list(one["figures"][0]) == names
    for step, (loss, told) in enumerate(zip(one["losses"], one["figures"], strict=True)):
        wanted = told["token_loss"] + told["marked_loss"] + 2 * step / 4 * told["contrastive_loss"]
        assert loss == pytest.approx(wanted, rel=1e-6)


def test_two_stages_in_bf16():
    (one,) = run_ranks(train, 1, 1, "js", torch.bfloat16)
    two = run_ranks(train, 2, 2, "js", torch.bfloat16)
    assert two[0]["losses"] == one["losses"] and two[1]["figures"] == one["figures"]


def test_two_replicas_are_one_with_all_groups():
    (one,) = run_ranks(train, 1, 1, "js")
    two = run_ranks(train, 2, 1, "js", torch.float32, "1f1b", 2)
    for rank in two:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for ours, theirs in zip(rank["figures"], one["figures"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        assert rank["held out"] == pytest.approx(one["held out"], rel=1e-4)


def test_held_out_figures_are_those_of_the_whole_set_at_once():
    """The trained weights, plain loops over micro-batches, true totals from the start."""
    (one,) = run_ranks(train, 1, 1, "cos")
    model = build(0, 1)
    model.load_state_dict(one["weights"], strict=False)
    model.eval()
    part, batches = loss_of("cos"), make_batches()
    totals = {name: torch.tensor(float(n)) for name, n in part.count(batches).items()}
    assert len(set(totals.values())) == 3, "counts that would be mixed up are seen"
    sums: dict[str, float] = {}
    with torch.no_grad():
        for batch in batches:
            inputs = {n: v for n, v in batch.items() if n in ("input_ids", "attention_mask")}
            output = model(batch["input_ids"], **inputs)
            loss, figures = part(output, batch, totals=totals, step=2)
            for name, value in {"loss": loss, **figures}.items():
                sums[name] = sums.get(name, 0.0) + value.item()
    assert one["held out"] == pytest.approx(sums, rel=1e-5)


# -- through the entry file ----------------------------------------------------------------

OPTIONS = (
    "--dataset groups --collate-fn contrastive --loss-fn contrastive --sim-fn js "
    "--loss-fn.warmup_steps 4 --loss-fn.start_step 1 --batch-size 8 --micro-batch-size 4"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrastive")
    write_lines(folder / "groups.jsonl", [group_row(i) for i in range(13)])
    return Job(folder)


def run(job, name, *options, file="groups.jsonl", **more):
    return job.fork(name, *OPTIONS, "--dataset-path", job.folder / file, *options, **more)


def records(job, name):
    lines = (job.folder / name / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_warm_up_goes_on_where_a_resumed_run_does(job):
    steps = ("--total-steps", 7, "--save-steps", 4)
    assert (done := run(job, "whole", *steps, ranks=1)).code == 0, done.err
    chaos = "at=step,step=6,do=sigkill"
    assert run(job, "parts", *steps, ranks=1, chaos=chaos, waits=True).code != 0
    done = run(job, "parts", *steps, "--resume", "auto", ranks=2)
    assert done.code == 0 and "4 of 7 steps are done" in done.out, done.err
    assert job.losses("parts") == pytest.approx(job.losses("whole"), rel=1e-6)
    for record in [one for one in records(job, "parts") if one["kind"] == "train"]:
        share = min(max((record["step"] - 1 - 1) / 4, 0), 1)
        wanted = record["token_loss"] + record["marked_loss"] + share * record["contrastive_loss"]
        assert record["loss"] == pytest.approx(wanted, rel=1e-5), record["step"]


def test_a_bad_member_leaves_its_group_out(job):
    rows = [group_row(i) for i in range(8)]
    rows[2]["negatives"][1]["question"] = "why? " * 60  # found while tokenizing
    rows[5]["anchor"] = "left"  # found while reading
    write_lines(job.folder / "bad.jsonl", rows)
    done = run(job, "bad", "--total-steps", 1, file="bad.jsonl", ranks=1)
    assert done.code == 3 and "bad.jsonl:6: 'anchor' is 'left'" in done.err
    options = ("--skip-bad-rows", 2, "--total-steps", 1, "--dataset.test_size", 0)
    done = run(job, "skipped", *options, file="bad.jsonl", ranks=1)
    assert done.code == 0, done.err
    assert "2 bad rows are left out" in done.out
    (step,) = [record for record in records(job, "skipped") if record["kind"] == "train"]
    assert step["num_samples"] == 8


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--batch-size", 6, "--micro-batch-size", 3), "--batch-size 6 and --micro-batch-size 3"),
        (("--packing",), "--packing does not work with a dataset of groups of 4"),
        (("--logits-chunk", 8), "--logits-chunk needs a sum over target tokens"),
        (("--dataset", "digits"), "--dataset digits has no groups"),
        (("--collate-fn", "sft"), "without loss_marks"),
    ],
)
def test_what_cannot_be_combined(job, options, wanted):
    done = run(job, "refused", *options, ranks=1)
    assert done.code == 2 and wanted in done.err
