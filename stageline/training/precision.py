"""Half-precision training: float32 master weights, float32 gradient sums, loss scaling for fp16.

Each gradient is added to the float32 gradient of its master as soon as autograd has made it, so
that many micro-batches do not lose small contributions.
"""

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

HALF_TYPES = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The parameters that an optimizer sees, by name: masters of half ones, the others themselves.

    Of a parameter that is shared out among replicas it sees this rank's share, a plain tensor;
    `shares` has the names of those.
    """

    def __init__(self, named_parameters: dict[str, nn.Parameter]) -> None:
        self.model_parameters = named_parameters
        self.parameters: dict[str, nn.Parameter] = {}
        self.shares: set[str] = set()
        for name, parameter in named_parameters.items():
            if isinstance(parameter, DTensor):
                # the same memory: an update of the share is one of the parameter
                self.parameters[name] = nn.Parameter(cast(DTensor, parameter.detach()).to_local())
                self.shares.add(name)
            elif parameter.dtype in HALF_TYPES:
                master = nn.Parameter(parameter.detach().float().clone())
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(_add_gradient, master)
                )
                self.parameters[name] = master
            else:
                self.parameters[name] = parameter

    def update(self, step: Callable[[], object]) -> None:
        step()
        self.write_back()

    def settle(self) -> None:
        """Wait until no step is under way: here none ever is."""

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model after an optimizer step."""
        own = {name: self.parameters[name] for name in self.parameters.keys() - self.shares}
        pairs = [(self.model_parameters[name], master) for name, master in own.items()]
        if pairs := [pair for pair in pairs if pair[0] is not pair[1]]:
            torch._foreach_copy_([model for model, _ in pairs], [master for _, master in pairs])

    def take_shares(self) -> None:
        """Take over the gradients of shares, once they are reduced."""
        for name in self.shares:
            grad = self.model_parameters[name].grad
            self.parameters[name].grad = None if grad is None else cast(DTensor, grad).to_local()

    def zero_grad(self) -> None:
        for name, parameter in self.model_parameters.items():
            parameter.grad = None
            self.parameters[name].grad = None


def _add_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None  # autograd has just added to it
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


class LossScaler:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv 1710.03740).

    Whether a step overflowed is read from the global gradient norm, which every rank has: all
    ranks skip the same steps and keep the same scale. Not `enabled`, the scale is always 1.
    """

    def __init__(
        self, *, enabled: bool, initial_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.enabled = enabled
        self.scale = initial_scale if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def unscale(self, parameters: dict[str, nn.Parameter]) -> None:
        for parameter in parameters.values() if self.enabled else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def update(self, *, overflowed: bool) -> None:
        """Halve the scale after an overflow, double it after `growth_interval` good steps."""
        if not self.enabled:
            return
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.good_steps = int(state["good_steps"])
