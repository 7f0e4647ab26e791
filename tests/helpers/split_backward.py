"""A backward pass in two walks, as zero-bubble schedules make it: inputs first, weights later."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Gradients = dict[str, torch.Tensor]


def plain_backward(
    output: torch.Tensor, grad: torch.Tensor | None, *, hidden: torch.Tensor, model: nn.Module
) -> Gradients:
    """All gradients of one stage by one ordinary backward pass; that of its input is `""`."""
    output.backward(grad)
    return _gradients(model, hidden)


def split_backward(
    output: torch.Tensor,
    grad: torch.Tensor | None,
    *,
    hidden: torch.Tensor,
    model: nn.Module,
    between: Callable[[], None] = lambda: None,
) -> Gradients:
    """Return the same gradients by torch's two functions.

    Args:
        between: called after the gradient of the input is there, before those of weights are.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = None if grad is None else [grad]
    _, groups = stage_backward_input([output], grads, [hidden], iter(weights))
    assert all(weight.grad is None for weight in weights)
    between()
    stage_backward_weight(iter(weights), groups)
    return _gradients(model, hidden)


def _gradients(model: nn.Module, hidden: torch.Tensor) -> Gradients:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return named if hidden.grad is None else {**named, "": hidden.grad}
