"""What an optimizer holds and needs for each element, found by a step on small parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stageline.pipeline.live_bytes import PeakBytes

MakeOptimizer = Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer | None]
_COUNT, _SIDE = 8, 128  # parameters to try on


@dataclass(frozen=True)
class OptimizerBytes:
    """For each trained element.

    Attributes:
        state: stays.
        update: more than that, during a step.
    """

    state: float
    update: float


def probe_optimizer(make_optimizer: MakeOptimizer, device: torch.device) -> OptimizerBytes:
    """Lets an optimizer make one step and counts.

    Args:
        make_optimizer: gets {name: parameter}.
    """
    parameters = {
        f"layers.{index}.weight": torch.nn.Parameter(torch.ones(_SIDE, _SIDE, device=device))
        for index in range(_COUNT)
    }
    optimizer = make_optimizer(parameters)
    if optimizer is None:
        return OptimizerBytes(0.0, 0.0)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    meter = PeakBytes(device)
    with meter.watch():
        optimizer.step()
    count = _COUNT * _SIDE * _SIDE
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    return OptimizerBytes(state / count, max(0, meter.peak - state) / count)
