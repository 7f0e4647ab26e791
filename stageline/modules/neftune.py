"""NEFTune (Jain et al. 2023, arXiv 2310.05914): noise on token embeddings, in training only.

As transformers' trainer does it: uniform between +-alpha / sqrt(T H), with T the tokens of a row,
padding included. `LayerSeeds` seeds the draw, so that it follows from seed, step and micro-batch
alone; images take the places of their tokens after it and stay as they are.
"""

import functools
from collections.abc import Iterable

import torch
from torch import nn

from stageline.modules.new_rows import vocabulary_modules

ALPHA = "neftune_alpha"


def add_noise(model: nn.Module, paths: Iterable[str], alpha: float) -> None:
    """Puts noise on the embeddings that are on this stage; behind what else changes them.

    Args:
        paths: of embedding and head in the whole model.
    """
    for module in vocabulary_modules(model, paths).values():
        if isinstance(module, nn.Embedding):
            setattr(module, ALPHA, alpha)
            module.register_forward_hook(functools.partial(_noisy, alpha))


def noisy_modules(model: nn.Module) -> list[nn.Module]:
    """The embeddings that draw in training."""
    return [module for module in model.modules() if hasattr(module, ALPHA)]


def _noisy(
    alpha: float, module: nn.Module, args: tuple, hidden_BTH: torch.Tensor
) -> torch.Tensor | None:
    if not module.training:
        return None
    most = alpha / (hidden_BTH.shape[1] * hidden_BTH.shape[2]) ** 0.5
    return hidden_BTH + torch.empty_like(hidden_BTH).uniform_(-most, most)
