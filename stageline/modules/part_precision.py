"""Parts of a half-precision model that compute in float32: its norms, and what its head gives.

Hooks of our own on the library's modules; parameter names stay.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

HALF_TYPES = (torch.bfloat16, torch.float16)


def norms_to_float32(model: nn.Module) -> list[str]:
    """Keeps and computes every norm of a half model in float32; what it gives is half again.

    Returns:
        The paths of the norms.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_norm(module)]
    for _, module in found:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.float()
        module.forward = functools.partial(_in_float32, module.forward)
    return [name for name, _ in found]


def _is_norm(module: nn.Module) -> bool:
    """LayerNorm, RMSNorm and those that are named after them, with weights in half precision."""
    own = list(module.parameters(recurse=False))
    return (
        "norm" in type(module).__name__.lower()
        and bool(own)
        and all(one.ndim == 1 and one.dtype in HALF_TYPES for one in own)
    )


def _in_float32(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    return forward(hidden.float(), *args, **kwargs).to(hidden.dtype)


def upcast_output(head: nn.Module) -> None:
    """Gives logits in float32, so that capping, scaling and the loss do not round them again."""
    head.register_forward_hook(_to_float32)


def _to_float32(module: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in HALF_TYPES else logits
