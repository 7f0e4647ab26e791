"""Looks at what optimizer, lr_scheduler, tracker and sim_fn parts gave, before the first step."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from stageline.contracts import broken, call, mismatch, shown


def check_optimizer(
    optimizer: object, parameters: Mapping[str, nn.Parameter], *, part: object
) -> None:
    """Refuses what is no optimizer, and one that leaves parameters out.

    Args:
        parameters: what was handed over, by name.

    Raises:
        ContractError: part, file and line, and what came are named.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not (isinstance(groups, list) and callable(getattr(optimizer, "step", None))):
        raise broken(
            "optimizer",
            part,
            f"returned {shown(optimizer)}",
            why="An optimizer object was expected, because it updates the weights and is saved",
            cure="return torch.optim.AdamW(param_groups, ...), or another one with param_groups "
            "and step()",
        )
    problem = mismatch(optimizer.step)
    if problem is not None:
        raise broken(
            "optimizer",
            part,
            f"returned {shown(optimizer)}, whose step() wants more ({problem})",
            why="One that steps by gradients alone was expected, because the passes of a step run "
            "over several ranks, once",
            cure="choose an optimizer without a closure",
        )
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in taken]
    if missing:
        raise broken(
            "optimizer",
            part,
            f"leaves out {len(missing)} of {len(parameters)} parameters: {', '.join(missing[:6])}"
            f"{', ...' if len(missing) > 6 else ''}",
            why="All were expected, because what it does not get is never trained",
            cure="hand all of param_groups to it (a list of dicts with params), or freeze these "
            "parts of the model (--frozen-*)",
        )


def check_learning_rate(rate_of: object, *, total_steps: int, part: object) -> None:
    """Refuses a schedule that is no function, or gives no rate for the first or the last step.

    Raises:
        ContractError: as above.
    """
    if not callable(rate_of):
        raise broken(
            "lr_scheduler",
            part,
            f"returned {shown(rate_of)}",
            why="A function was expected, because each step asks for its rate by number, also one "
            "that a resumed run begins with",
            cure="return lambda step: rate; torch's schedulers count by themselves",
        )
    for step in {0, max(0, total_steps - 1)}:
        rate = call("lr_scheduler", rate_of, step)
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (is_number and math.isfinite(rate) and rate >= 0):
            raise broken(
                "lr_scheduler",
                part,
                f"gave {shown(rate)} as the rate of step {step}",
                why="A number of 0 or more was expected, because it is the learning rate",
                cure="return a float from the function",
            )


def check_tracker(tracker: object, *, part: object) -> None:
    """Refuses what cannot log; None is none.

    Raises:
        ContractError: as above.
    """
    lacks = [name for name in ("log", "close") if not callable(getattr(tracker, name, None))]
    if tracker is not None and lacks:
        raise broken(
            "tracker",
            part,
            f"returned {shown(tracker)}, without {' and '.join(lacks)}",
            why="An object with both was expected, because each step is told to it",
            cure="return such an object, or None",
        )


def check_sim_fn(sim_fn: Callable[..., torch.Tensor]) -> None:
    """Refuses what does not give one similarity for each pair of vectors.

    Raises:
        ContractError: as above.
    """
    generator = torch.Generator().manual_seed(0)
    a_NV, b_NV = torch.rand((2, 3, 8), generator=generator).softmax(dim=-1)
    found = call("sim_fn", sim_fn, a_NV, b_NV)
    if not (isinstance(found, torch.Tensor) and found.shape == (3,)):
        raise broken(
            "sim_fn",
            sim_fn,
            f"returned {shown(found)} for 3 pairs of vectors of 8 numbers",
            why="3 similarities were expected, because those of a group are compared",
            cure="reduce the last dimension alone",
        )
