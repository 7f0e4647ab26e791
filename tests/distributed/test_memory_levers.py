"""Training with every memory lever at once against training with none, over two stages."""

import pytest
import torch

from loss_fn import sft
from optimizer import adamw
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.modules.chunked_loss import ChunkedLoss
from stageline.modules.recompute import offload_activations
from stageline.pipeline.runner import PipelineRunner
from stageline.training.evaluation import evaluate
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

NUM_STEPS = 3


def train(rank, family, chunk, has_levers):
    stage = CausalLMStage(tiny_config(family, tied=True), stage=rank, num_stages=2)
    init_split_model(stage, seed=1, device="cpu", dtype=torch.float32)
    stage.frozen()
    stage.train()
    loss_fn = sft
    if has_levers:
        stage.enable_gradient_checkpointing(every=2, mode="operators")
        offload_activations(stage, moves=torch.is_floating_point)
    if chunk:
        stage.logits_chunk = chunk
        loss_fn = ChunkedLoss(sft, whole=stage.whole, chunk=chunk)
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    step = TrainStep(
        runner,
        make_optimizer=lambda parameters: adamw(
            optimizer_groups(parameters, weight_decay=0.1), learning_rate=1e-3, weight_decay=0.1
        ),
        loss_fn=loss_fn,
        learning_rate=lambda step: 1e-3,
    )
    batches = tiny_micro_batches(family)
    results = [step(batches, step=index) for index in range(NUM_STEPS)]
    held_out = evaluate(runner, [batches], loss_fn=loss_fn, keep=3)
    return {
        "figures": [[result.loss, result.grad_norm] for result in results],
        "held_out": [held_out.loss, held_out.token_accuracy, float(held_out.num_targets)],
        "predicted": held_out.predicted,
        "weights": {name: p.detach().clone() for name, p in stage.named_parameters()},
    }


@pytest.mark.parametrize("chunk", [0, 4])
def test_levers_change_no_number(chunk):
    plain = run_ranks(train, 2, "gemma2", 0, False)
    saving = run_ranks(train, 2, "gemma2", chunk, True)
    for ours, theirs in zip(saving, plain, strict=True):
        assert ours["predicted"] == theirs["predicted"] and len(ours["predicted"]) == 3
        if chunk == 0:
            assert ours["figures"] == theirs["figures"]
            assert all(torch.equal(w, theirs["weights"][n]) for n, w in ours["weights"].items())
        for name in ("figures", "held_out"):
            torch.testing.assert_close(
                torch.tensor(ours[name]), torch.tensor(theirs[name]), rtol=1e-5, atol=1e-6
            )
