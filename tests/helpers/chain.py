"""The chain of stages of `stageline/checking/batches.py`, by the name that tests know."""

from collections.abc import Sequence

import torch

from pp_models import StageModel
from stageline.checking.batches import LossFn, chain_of, drop_pixels, forward_chain, run_chain
from stageline.pipeline.stage_passes import MicroBatch

__all__ = ["LossFn", "drop_pixels", "evaluate_chain", "run_chain"]


@torch.no_grad()
def evaluate_chain(
    stages: Sequence[StageModel], micro_batches: Sequence[MicroBatch], *, loss_fn: LossFn
) -> list[torch.Tensor]:
    """The loss of each micro-batch without gradients; modes stay as they are."""
    chain = chain_of(stages)
    return [
        forward_chain(chain, index, batch, loss_fn) for index, batch in enumerate(micro_batches)
    ]
