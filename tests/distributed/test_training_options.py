"""Half precision, checkpointing, freezing, LoRA: two stages against one; and memory levers."""

import functools

import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.modules.chunked_loss import ChunkedLoss
from stageline.modules.recompute import offload_activations
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.training.evaluation import evaluate
from stageline.training.optimizers import optimizer_groups
from stageline.training.precision import LossScaler
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_STEPS = 2


def make_optimizer(parameters):
    if not parameters:
        return None
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=3e-3)


def build(stage, num_stages, options, dtype, checkpointing, config):
    model = CausalLMStage(config, stage=stage, num_stages=num_stages, dtype=dtype, **options)
    init_split_model(model, seed=1, device="cpu", dtype=dtype)
    model.frozen()
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    return model


def train(
    rank,
    num_ranks,
    options,
    dtype=torch.float32,
    checkpointing=False,
    scale=None,
    schedule="1f1b",
    config=None,
    has_levers=False,
    chunk=0,
):
    plan = make_schedule(schedule, num_ranks=num_ranks)
    config = config or tiny_config("llama")
    stages = [
        build(stage, plan.num_stages, options, dtype, checkpointing, config)
        for stage in plan.stages_of(rank)
    ]
    loss_fn = sft
    if has_levers:
        stages[0].enable_gradient_checkpointing(every=2, mode="operators")
        offload_activations(stages[0], moves=torch.is_floating_point)
    if chunk:
        stages[0].logits_chunk = chunk
        loss_fn = ChunkedLoss(sft, whole=stages[0].whole, chunk=chunk)
    runner = PipelineRunner(stages, device=torch.device("cpu"), schedule=plan)
    scaler = LossScaler(enabled=scale is not None, initial_scale=scale or 1.0)
    step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=loss_fn,
        learning_rate=lambda step: 3e-3,
        scaler=scaler,
    )
    batches = tiny_micro_batches("llama")
    results = [step(batches, step=index) for index in range(NUM_STEPS)]
    held_out = evaluate(runner, [batches], loss_fn=loss_fn, keep=3)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.is_skipped for result in results],
        "scale": scaler.scale,
        "held_out": [held_out.loss, held_out.token_accuracy, held_out.num_targets],
        "predicted": held_out.predicted,
        "weights": {n: p.detach().clone() for n, p in runner.local.named_parameters().items()},
        "trainable": [n for n, p in runner.local.named_parameters().items() if p.requires_grad],
    }


def train_schedules(rank, schedules, *variant):
    return [train(rank, 2, *variant, schedule=schedule) for schedule in schedules]


LORA = {"llm_lora_num": 1, "lora_rank": 2, "frozen_lm_head": True}
# one adapter, and what is frozen, in test_schedule_parity.py; recomputation repeats passes, so it
# runs under every schedule, the others under the plain one and those that split backward passes
FEW = ("1f1b", "interleaved_zero_bubble", "zbv")
VARIANTS = {
    "bf16": ({}, torch.bfloat16, False, None),
    "fp16": ({}, torch.float16, False, 1024.0),
    "checkpointing": ({}, torch.float32, True, None),
    "two adapters": ({**LORA, "llm_lora_num": 2}, torch.float32, False, None),
    "lora, checkpointing": (LORA, torch.float32, True, None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_schedules_equal_one_stage(name):
    variant = VARIANTS[name]
    (one,) = run_ranks(train, 1, 1, *variant)
    schedules = list(SCHEDULES) if name == "checkpointing" else FEW
    ranks = run_ranks(train_schedules, 2, schedules, *variant)
    start = start_weights(variant[0], variant[1])
    for index, schedule in enumerate(schedules):
        two = [rank[index] for rank in ranks]
        for rank in two:
            for key in ("losses", "norms", "held_out", "predicted"):
                if schedule != "looped_bfs":  # it adds micro-batches up in another order
                    assert rank[key] == one[key], (schedule, key)
            for parameter, weight in rank["weights"].items():
                theirs = one["weights"][parameter]
                assert torch.equal(weight, theirs) or schedule == "looped_bfs", (
                    schedule,
                    parameter,
                )
        assert {n for rank in two for n in rank["trainable"]} == set(one["trainable"])
    changed = {n for n, w in one["weights"].items() if not torch.equal(w, start[n])}
    assert changed == set(one["trainable"]), "what trains moves, what is frozen stays"
    assert len(set(one["losses"])) == NUM_STEPS


def start_weights(options, dtype):
    stage = CausalLMStage(tiny_config("llama"), stage=0, num_stages=1, dtype=dtype, **options)
    init_split_model(stage, seed=1, device="cpu", dtype=dtype)
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


def test_an_overflow_is_skipped_on_every_stage():
    results = run_ranks(train, 2, 2, {}, torch.float16, False, 2.0**40)
    start = start_weights({}, torch.float16)
    for result in results:
        assert result["skipped"] == [True] * NUM_STEPS
        assert result["scale"] == 2.0 ** (40 - NUM_STEPS)
        for name, weight in result["weights"].items():
            assert torch.equal(weight, start[name])


@pytest.mark.parametrize("chunk", [0, 4])
def test_memory_levers_change_no_number(chunk):
    """All of them at once, in a tied model with capped logits."""
    config = tiny_config("gemma2", tied=True)
    plain, saving = (
        run_ranks(functools.partial(train, config=config, **levers), 2, 2, {})
        for levers in ({}, {"has_levers": True, "chunk": chunk})
    )
    for ours, theirs in zip(saving, plain, strict=True):
        assert ours["predicted"] == theirs["predicted"] and len(ours["predicted"]) == 3
        for name in ("losses", "norms", "held_out"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5 if chunk else 0, abs=0)
        if chunk == 0:
            assert all(torch.equal(w, theirs["weights"][n]) for n, w in ours["weights"].items())
