"""The optimizer and lr_scheduler parts."""

import math
from collections.abc import Callable

import torch

from register import lr_scheduler_register, optimizer_register


@optimizer_register("adamw")
def adamw(
    param_groups: list[dict],
    *,
    learning_rate: float,
    weight_decay: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); groups may set their own decay.

    Args:
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the second moment.
        fused: one kernel for the whole step; by default where all parameters are on a GPU.
    """
    if fused is None:  # on a CPU it rounds differently
        fused = all(weight.is_cuda for group in param_groups for weight in group["params"])
    return torch.optim.AdamW(
        param_groups,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        fused=fused or None,  # None: torch still takes its loop-free kernels on a GPU
    )


@optimizer_register("sgd")
def sgd(
    param_groups: list[dict], *, learning_rate: float, weight_decay: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum.

    Args:
        momentum: decay of the velocity.
    """
    return torch.optim.SGD(
        param_groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay
    )


@lr_scheduler_register("cosine")
def cosine(
    *,
    learning_rate: float,
    min_lr: float,
    warmup_steps: int,
    warmup_start_lr: float,
    total_steps: int,
) -> Callable[[int], float]:
    """Linear warm-up, then half a cosine down to `min_lr` at `total_steps`."""

    def decayed(step: int) -> float:
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min_lr + (learning_rate - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return _after_warmup(decayed, learning_rate, warmup_steps, warmup_start_lr)


@lr_scheduler_register("constant")
def constant(
    *,
    learning_rate: float,
    min_lr: float,
    warmup_steps: int,
    warmup_start_lr: float,
    total_steps: int,
) -> Callable[[int], float]:
    """Linear warm-up, then `learning_rate` to the end."""
    return _after_warmup(lambda step: learning_rate, learning_rate, warmup_steps, warmup_start_lr)


def _after_warmup(
    rate: Callable[[int], float], learning_rate: float, warmup_steps: int, start: float
) -> Callable[[int], float]:
    """A straight line from `start` to `learning_rate` first, then `rate`."""

    def with_warmup(step: int) -> float:
        if step < warmup_steps:
            return start + (learning_rate - start) * step / warmup_steps
        return rate(step)

    return with_warmup
