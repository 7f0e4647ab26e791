"""Parameter groups: no weight decay on norms and biases; a learning rate for each part."""

from collections.abc import Callable
from typing import Any

from torch import nn

LR_SCALE = "lr_scale"  # a group's rate as a multiple of the scheduled one; without it 1


def optimizer_groups(
    named_parameters: dict[str, nn.Parameter],
    *,
    weight_decay: float,
    lr_scale_of: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, object]]:
    """Return groups for a torch optimizer: matrices decay, norms and biases do not.

    Args:
        lr_scale_of: a parameter's name -> multiple of the scheduled rate.
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
