"""Placeholders for modules that another stage owns: they keep indices and names, and hold nothing.

A dropped layer stays in its `ModuleList` under its old index, so that `layers.7` is `layers.7` on
every stage and per-layer settings (`config.layer_types[i]`) stay true.
"""

import torch
from torch import nn

# a mark of transformers: its init functions skip such a tensor or module
DONE = "_is_hf_initialized"


class PassThrough(nn.Module):
    """Returns its first argument: stands for a layer, a norm, a head or a dropout."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return args[0] if args else next(iter(kwargs.values()))


class ZeroEmbedding(nn.Module):
    """Returns a zero that broadcasts: stands for learned positions, which stage 0 has added."""

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        # Not of a floating dtype of its own: the sum keeps the dtype of the hidden states.
        return torch.zeros((), dtype=torch.int64, device=ids.device)
