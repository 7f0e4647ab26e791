"""Joins a forward pass without a graph to autograd: its backward recomputes and streams again."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Detour(torch.autograd.Function):
    """From the inputs of a call to its outputs; in backward the engine runs its own way.

    `run_forward()` gives the output leaves, `run_backward(gradients)` the inputs' gradients. As
    with a checkpoint, there is no second backward pass through it.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        run_forward: Callable[[], list[Any]],
        run_backward: Callable[[tuple], list[Any]],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.is_used = False
        outputs = run_forward()
        plain = [each for each in outputs if not (each.is_floating_point() or each.is_complex())]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:  # type: ignore[override]
        if ctx.is_used:
            raise RuntimeError(
                "backward came a second time through one call of RoundPipe: what it kept is gone "
                "after the first. Call the model again."
            )
        ctx.is_used = True
        return (None, None, None, *ctx.run_backward(gradients))


def through_detour(
    run_forward: Callable[[], Any], run_backward: Callable[[list[Any]], list[Any]], inputs: Any
) -> Any:
    """The value of `run_forward()`, whose tensors lead back to `run_backward`.

    Args:
        run_forward: gives nested tuples, lists and dicts with tensors.
        run_backward: gets a gradient or None for each tensor of them, gives one for each of
            `inputs`.
        inputs: the tensors of the call, in order.
    """
    kept: dict[str, Any] = {}

    def run() -> list[Any]:
        leaves, kept["structure"] = pytree.tree_flatten(run_forward())
        kept["leaves"] = leaves
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    anchor = torch.zeros((), requires_grad=True)  # inputs alone need not want gradients
    tensors = Detour.apply(run, lambda each: run_backward(list(each)), anchor, *inputs)
    made = iter(tensors)
    leaves = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in kept["leaves"]]
    return pytree.tree_unflatten(leaves, kept["structure"])
