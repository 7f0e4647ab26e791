"""Half precision, checkpointing, freezing and LoRA: two stages against one."""

import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.testing.ranks import run_ranks
from stageline.testing.tiny_batches import tiny_micro_batches
from stageline.testing.tiny_models import tiny_config
from stageline.training.evaluation import evaluate
from stageline.training.optimizer_groups import optimizer_groups
from stageline.training.precision import LossScaler
from stageline.training.step import TrainStep

NUM_STEPS = 3


def make_optimizer(parameters):
    if not parameters:
        return None
    return torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=1e-3)


def train(rank, num_stages, options, dtype=torch.float32, checkpointing=False, scale=None):
    stage = CausalLMStage(
        tiny_config("llama"), stage=rank, num_stages=num_stages, dtype=dtype, **options
    )
    init_split_model(stage, seed=1, device="cpu", dtype=dtype)
    stage.frozen()
    stage.train()
    if checkpointing:
        stage.enable_gradient_checkpointing()
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    scaler = LossScaler(enabled=scale is not None, initial_scale=scale or 1.0)
    step = TrainStep(
        runner,
        make_optimizer=make_optimizer,
        loss_fn=sft,
        learning_rate=lambda step: 1e-3,
        scaler=scaler,
    )
    batches = tiny_micro_batches("llama")
    results = [step(batches, step=index) for index in range(NUM_STEPS)]
    held_out = evaluate(runner, [batches], loss_fn=sft, keep=3)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.is_skipped for result in results],
        "scale": scaler.scale,
        "held_out": [held_out.loss, held_out.token_accuracy, held_out.num_targets],
        "predicted": held_out.predicted,
        "weights": {name: p.detach().clone() for name, p in stage.named_parameters()},
        "trainable": [name for name, p in stage.named_parameters() if p.requires_grad],
    }


LORA = {"llm_lora_num": 1, "lora_rank": 2, "frozen_lm_head": True}
VARIANTS = {
    "bf16": ({}, torch.bfloat16, False, None),
    "fp16": ({}, torch.float16, False, 1024.0),
    "checkpointing": ({}, torch.float32, True, None),
    "lora": (LORA, torch.float32, False, None),
    "two adapters": ({**LORA, "llm_lora_num": 2}, torch.float32, False, None),
    "frozen language model": ({"frozen_llm": True}, torch.float32, False, None),
    "lora, checkpointing": (LORA, torch.float32, True, None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_two_stages_equal_one(name):
    variant = VARIANTS[name]
    (one,) = run_ranks(train, 1, 1, *variant)
    two = run_ranks(train, 2, 2, *variant)
    start = run_ranks(train_nothing, 1, variant[0], variant[1])[0]
    for stage in two:
        for key in ("losses", "norms", "held_out", "predicted"):
            assert stage[key] == one[key], key
        for parameter, weight in stage["weights"].items():
            assert torch.equal(weight, one["weights"][parameter]), parameter
    assert {n for stage in two for n in stage["trainable"]} == set(one["trainable"])
    changed = {n for n, w in one["weights"].items() if not torch.equal(w, start[n])}
    assert changed == set(one["trainable"]), "what trains moves, what is frozen stays"
    assert len(set(one["losses"])) == NUM_STEPS


def train_nothing(rank, options, dtype):
    stage = CausalLMStage(tiny_config("llama"), stage=0, num_stages=1, dtype=dtype, **options)
    init_split_model(stage, seed=1, device="cpu", dtype=dtype)
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


def test_an_overflow_is_skipped_on_every_stage():
    results = run_ranks(train, 2, 2, {}, torch.float16, False, 2.0**40)
    start = run_ranks(train_nothing, 1, {}, torch.float16)[0]
    for result in results:
        assert result["skipped"] == [True] * NUM_STEPS
        assert result["scale"] == 2.0 ** (40 - NUM_STEPS)
        for name, weight in result["weights"].items():
            assert torch.equal(weight, start[name])


def test_checkpointing_changes_no_number():
    plain = run_ranks(train, 2, 2, {}, torch.float32, False)
    recomputed = run_ranks(train, 2, 2, {}, torch.float32, True)
    for a, b in zip(plain, recomputed, strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
