"""Parameter groups: no weight decay on norms and biases; a learning rate for each part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

LR_SCALE = "lr_scale"  # a group's rate as a multiple of the scheduled one; without it 1


def optimizer_groups(
    named_parameters: dict[str, nn.Parameter],
    *,
    weight_decay: float,
    lr_scale_of: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, object]]:
    """Split parameters by decay and learning rate: matrices decay, norms and biases do not.

    Args:
        lr_scale_of: a parameter's name -> multiple of the scheduled rate.

    Returns:
        Groups for a torch optimizer; the names stand in `param_names`. Empty groups are left out.
    """
    chosen: dict[tuple[bool, float], dict[str, nn.Parameter]] = {}
    for name, parameter in named_parameters.items():
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        chosen.setdefault((decays, lr_scale_of(name)), {})[name] = parameter
    return [
        {
            "params": list(parameters.values()),
            "param_names": list(parameters),
            "weight_decay": weight_decay if decays else 0.0,
            **({LR_SCALE: scale} if scale != 1.0 else {}),
        }
        for (decays, scale), parameters in sorted(
            chosen.items(), key=lambda item: (not item[0][0], item[0][1])
        )
    ]


def set_learning_rate(groups: list[dict[str, Any]], rate: float) -> None:
    """Set the scheduled rate in each group of an optimizer, times its own multiple."""
    for group in groups:
        group["lr"] = rate * group.get(LR_SCALE, 1.0)


Group = dict[str, Any]


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that share `state` and `param_groups`, so that one sees all of them.

    Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) makes the momentum of a matrix
    orthogonal before it is added. That is meant for matrices between hidden states: embeddings,
    heads, norms and biases get AdamW.

    Args:
        param_groups: with `params` and `param_names`.
        adamw_names: a parameter whose name has one of these texts in it gets AdamW.
    """

    def __init__(
        self,
        param_groups: Sequence[Group],
        *,
        adamw_names: Sequence[str],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        inner: list[Group] = []
        outer: list[Group] = []
        for group in param_groups:
            split: dict[bool, dict[str, nn.Parameter]] = {True: {}, False: {}}
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                is_inner = weight.ndim == 2 and not any(text in name for text in adamw_names)
                split[is_inner][name] = weight
            for groups, chosen in ((inner, split[True]), (outer, split[False])):
                if chosen:
                    own = {"params": list(chosen.values()), "param_names": list(chosen)}
                    groups.append({**group, **own})
        self.optimizers: list[torch.optim.Optimizer] = []
        if inner:
            self.optimizers.append(torch.optim.Muon(inner, **muon))
        if outer:
            self.optimizers.append(torch.optim.AdamW(outer, **adamw))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        super().__init__(groups, defaults={})
        for optimizer in self.optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    # torch's optimizers take a closure, which no step here has
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()
