"""Ties tensors to another one's backward pass without any effect on its value."""

from collections.abc import Sequence

import torch


def with_zero_gradients(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """`tensor`, whose backward pass also gives each of `others` a gradient of zeros.

    Not `tensor + 0 * other.sum()`, which is nan where the other one holds inf or nan.
    """
    return _WithoutEffect.apply(tensor, *others) if others else tensor


class _WithoutEffect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.kinds = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # one zero for each tensor, in all of its places: no memory before it is added
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.kinds
        ]
        return grad, *zeros
