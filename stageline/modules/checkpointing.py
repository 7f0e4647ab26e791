"""Which layers are recomputed in the backward pass, and what of them is kept all the same."""

import functools
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from stageline.modules.pass_through import PassThrough
from stageline.modules.recompute import Contexts, recompute

CheckpointMode = Literal["full", "operators"]

# Products of activations and weights. Not bmm: in eager attention that is [T, T] for each head.
_MATMULS = ("mm", "addmm", "_grouped_mm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_SAVED = {
    getattr(torch.ops.aten, name).default
    for name in (*_MATMULS, *_ATTENTION)
    if hasattr(torch.ops.aten, name)
}


def keep_products(
    context: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Keeps the outputs of matrix products and fused attention; all else is made anew.

    Attention with dropout is made anew too: skipping it would shift the random numbers of what
    comes after it.
    """
    if operator in _SAVED and not _has_dropout(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operator: object, args: tuple, kwargs: dict[str, object]) -> bool:
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else argument.default_value
            return float(kwargs.get("dropout_p", given) or 0.0) > 0.0
    return False


CONTEXTS: dict[str, Contexts | None] = {
    "full": None,
    "operators": functools.partial(create_selective_checkpoint_contexts, keep_products),
}


def checkpoint_layers(
    layers: Iterable[tuple[int, nn.Module]], *, every: int = 1, mode: CheckpointMode = "full"
) -> None:
    """Recomputes every n-th layer in the backward pass. In place; names of parameters stay.

    Args:
        layers: (index in the whole model, layer); a layer of another stage may be among them.
        every: layers 0, n, 2 n, ... of the whole model, so that each split recomputes the same.
        mode: "operators" keeps the outputs of matrix products and attention.
    """
    for index, layer in layers:
        if index % every == 0 and not isinstance(layer, PassThrough):
            layer.forward = functools.partial(recompute, layer.forward, contexts=CONTEXTS[mode])
            layer.is_recomputed = True


def recomputes(model: nn.Module) -> bool:
    """Whether some layer of `model` is recomputed in the backward pass."""
    return any(getattr(module, "is_recomputed", False) for module in model.modules())


def tower_layers(model: nn.Module, *, but: Iterable[nn.Module]) -> list[tuple[int, nn.Module]]:
    """(index, layer) of the repeated layers that are not among `but`: those of a vision tower."""
    left_out = {id(layer) for layer in but}
    found = []
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in left_out:
            found.append((int(leaf) if leaf.isdigit() else 0, module))
    return found
