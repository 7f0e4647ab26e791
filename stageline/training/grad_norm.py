"""The gradient norm of the whole model, and clipping by it, across pipeline stages.

Norms are gathered per parameter and reduced in the order of the whole model on every rank: a sum
of squares per rank would differ from the unsplit model in the last bits, and so would the weights.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from stageline.pipeline.ownership import Ownership

NO_GRADIENT = -1.0


class Owner(NamedTuple):
    """Where a trained parameter is: its name, the rank of the pipeline, the stage."""

    name: str
    rank: int
    stage: int


def gather_owners(ownership: Ownership, stage_of: Mapping[str, int]) -> list[Owner]:
    """The owners of all counted parameters in the order of the whole model; once, by all ranks.

    Args:
        stage_of: name -> stage, of this rank's parameters.
    """
    own = [(name, stage_of[name]) for name in ownership.counted]
    gathered: list[list[tuple[str, int]]] = [[] for _ in ownership.model_order]
    dist.all_gather_object(gathered, own, group=ownership.group)
    by_place = {
        place: Owner(name, rank, stage)
        for rank, places in enumerate(ownership.model_order)
        for place, (name, stage) in zip(places, gathered[rank], strict=True)
    }
    return [by_place[place] for place in range(len(by_place))]


def gather_norms(
    parameters: dict[str, nn.Parameter],
    *,
    ownership: Ownership,
    shares: Collection[str] = (),
    replica_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The norms of all gradients of all stages, in the order of the whole model, on every rank.

    `NO_GRADIENT` for a parameter without one. Each tied weight is there once.

    Args:
        shares: names of parameters of which the ranks of `replica_group` hold a share each.
    """
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    longest = max(1, max(len(places) for places in ownership.model_order))
    own = torch.full((longest,), NO_GRADIENT, device=device)
    for index, name in enumerate(ownership.counted):
        grad = parameters[name].grad
        if grad is not None:
            own[index] = torch.linalg.vector_norm(grad.float())
    places = [index for index, name in enumerate(ownership.counted) if name in shares]
    if places:
        own[places] = _join_norms(own[places], replica_group)
    gathered = [torch.empty_like(own) for _ in ownership.model_order]
    dist.all_gather(gathered, own, group=ownership.group)
    norms = torch.zeros(sum(len(places) for places in ownership.model_order), device=device)
    for rank_norms, places in zip(gathered, ownership.model_order, strict=True):
        norms[places] = rank_norms[: len(places)]
    return norms


def total_norm(norms: torch.Tensor) -> torch.Tensor:
    """The 2-norm over all gradients from `gather_norms`; the same scalar on every rank."""
    return torch.linalg.vector_norm(norms[norms != NO_GRADIENT])


def stages_without_gradient(norms: Sequence[float], owners: Sequence[Owner]) -> list[int]:
    """Stages that train, and whose gradients are all zero or missing."""
    highest: dict[int, float] = {}
    for norm, owner in zip(norms, owners, strict=True):
        is_larger = not norm <= highest.get(owner.stage, 0.0)  # nan too
        highest[owner.stage] = norm if is_larger else highest.get(owner.stage, 0.0)
    return sorted(stage for stage, norm in highest.items() if norm == 0.0)


def _join_norms(norms: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The norms of whole gradients from those of the shares of all ranks of `group`."""
    squares = norms.double().square()  # in float32 large ones would overflow
    dist.all_reduce(squares, group=group)
    return torch.where(norms == NO_GRADIENT, norms, squares.sqrt().to(norms.dtype))


def clip_gradients(
    parameters: dict[str, nn.Parameter], *, max_norm: float, total_norm: torch.Tensor
) -> None:
    """Scales all gradients so that their norm is at most `max_norm`; as torch's own clipping."""
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
