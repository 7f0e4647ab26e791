"""Find the owner of each trained parameter, and compute the gradient norm of the whole model.

A weight that is tied across stages (embedding and head) is on two ranks under one name: its
gradients are summed before each step, and it counts once in the norm. Norms are gathered per
parameter and reduced in the order of the whole model: a sum of squares per rank would differ from
the unsplit model in the last bits.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from stageline.modules.lora import wrapped_module


class Ownership:
    """Ownership of trained parameters, from the names that each rank of the pipeline trains.

    Args:
        named_parameters: this rank's trainable parameters by name.
        order: the whole model's parameter names in its own order; adapters, which are not in it,
            have the place of the layer that they wrap.
        group: the pipeline's process group.

    Attributes:
        counted: this rank's names that count in a norm: all but later copies of tied weights.
        model_order: for every rank, the places of its counted parameters in the whole model.
    """

    def __init__(
        self,
        named_parameters: dict[str, nn.Parameter],
        *,
        order: list[str],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        names: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(names, list(named_parameters), group=group)
        self.names_by_rank = names
        holders: dict[str, list[int]] = {}
        for rank, rank_names in enumerate(names):
            for name in rank_names:
                holders.setdefault(name, []).append(rank)
        self.tied = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        counted_by_rank = [
            [name for name in rank_names if holders[name][0] == rank]
            for rank, rank_names in enumerate(names)
        ]
        self.counted = counted_by_rank[self.rank]
        positions = {name: index for index, name in enumerate(order)}
        modules: dict[str, int] = {}
        for index, name in enumerate(order):
            modules.setdefault(name.rpartition(".")[0], index)
        keys = []
        for rank, rank_names in enumerate(counted_by_rank):
            for index, name in enumerate(rank_names):
                # an adapter has the place of its layer
                place = modules.get(wrapped_module(name), len(order))
                keys.append((positions.get(name, place), rank, index))
        places = {key[1:]: place for place, key in enumerate(sorted(keys))}
        self.model_order = [
            [places[rank, index] for index in range(len(rank_names))]
            for rank, rank_names in enumerate(counted_by_rank)
        ]
        self._on_device: dict[Any, Any] = {}

    def order_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return `model_order` as tensors on a device; sent there once."""
        if device not in self._on_device:
            self._on_device[device] = [
                torch.tensor(places, dtype=torch.long, device=device) for places in self.model_order
            ]
        return self._on_device[device]

    def marks_on(self, device: torch.device, names: Collection[str]) -> torch.Tensor:
        """Return which of `counted` are among these names, on a device; sent there once."""
        key = device, frozenset(names)
        if key not in self._on_device:
            marks = [name in names for name in self.counted]
            self._on_device[key] = torch.tensor(marks, device=device)
        return self._on_device[key]

    def sum_tied_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Sum the gradients of tied weights over the stages that hold a copy."""
        for name, ranks in self.tied.items():
            if self.rank not in ranks:
                continue
            parameter = parameters[name]
            if parameter.numel() == 0:
                continue  # a share of a weight with fewer rows than replicas; peers have the same
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            own, ops = own.contiguous(), []
            copies = {rank: torch.empty_like(own) for rank in ranks if rank != self.rank}
            for peer, buffer in copies.items():
                to = peer if self.group is None else dist.get_global_rank(self.group, peer)
                ops.append(dist.P2POp(dist.isend, own, to, self.group))
                ops.append(dist.P2POp(dist.irecv, buffer, to, self.group))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            copies[self.rank] = own
            # in the order of the stages on every rank, so that the sums are equal to the bit
            total = copies[ranks[0]].clone()
            for rank in ranks[1:]:
                total += copies[rank]
            parameter.grad = total


NO_GRADIENT = -1.0


class Owner(NamedTuple):
    """Location of a trained parameter: its name, the rank of the pipeline, the stage."""

    name: str
    rank: int
    stage: int


def gather_owners(ownership: Ownership, stage_of: Mapping[str, int]) -> list[Owner]:
    """Return the owners of all counted parameters in the order of the whole model, on all ranks.

    Args:
        stage_of: name -> stage, of this rank's parameters.
    """
    own = [Owner(name, ownership.rank, stage_of[name]) for name in ownership.counted]
    gathered: list[list[Owner]] = [[] for _ in ownership.model_order]
    dist.all_gather_object(gathered, own, group=ownership.group)
    placed = zip(ownership.model_order, gathered, strict=True)
    pairs = [pair for places, owners in placed for pair in zip(places, owners, strict=True)]
    return [owner for _, owner in sorted(pairs)]


def gather_norms(
    parameters: dict[str, nn.Parameter],
    *,
    ownership: Ownership,
    device: torch.device,
    shares: Collection[str] = (),
    replica_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norms of all gradients in the order of the whole model, on every rank.

    `NO_GRADIENT` for a parameter without one. Each tied weight is there once.

    Args:
        device: of the tensors that are sent; a rank may train nothing.
        shares: names of parameters of which the ranks of `replica_group` hold a share each.
    """
    longest = max(1, max(len(places) for places in ownership.model_order))
    own = torch.full((longest,), NO_GRADIENT, device=device)
    grads = [parameters[name].grad for name in ownership.counted]
    present = [grad.float() for grad in grads if grad is not None]
    if present:
        # one kernel for many gradients: a host that launches one for each keeps the GPU waiting
        found, none = iter(torch._foreach_norm(present)), own[0]
        own[: len(grads)] = torch.stack([none if g is None else next(found) for g in grads])
    if any(name in shares for name in ownership.counted):
        counted = own[: len(ownership.counted)]
        squares = counted.double().square()  # in float32 large ones would overflow
        dist.all_reduce(squares, group=replica_group)
        is_joined = ownership.marks_on(device, shares) & (counted != NO_GRADIENT)
        counted.copy_(torch.where(is_joined, squares.sqrt().to(counted.dtype), counted))
    gathered = [torch.empty_like(own) for _ in ownership.model_order]
    dist.all_gather(gathered, own, group=ownership.group)
    norms = torch.zeros(sum(len(places) for places in ownership.model_order), device=device)
    for rank_norms, order in zip(gathered, ownership.order_on(device), strict=True):
        norms[order] = rank_norms[: len(order)]
    return norms


def total_norm(norms: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm over all gradients from `gather_norms`; the same on every rank."""
    if norms.device.type != "cpu":  # where the host would wait for an index; nan stays
        return torch.linalg.vector_norm(norms.clamp(min=0.0))
    return torch.linalg.vector_norm(norms[norms != NO_GRADIENT])


def stages_without_gradient(norms: Sequence[float], owners: Sequence[Owner]) -> list[int]:
    """Return the stages that train and whose gradients are all zero or missing."""
    highest: dict[int, float] = {}
    for norm, owner in zip(norms, owners, strict=True):
        is_larger = not norm <= highest.get(owner.stage, 0.0)  # nan too
        highest[owner.stage] = norm if is_larger else highest.get(owner.stage, 0.0)
    return sorted(stage for stage, norm in highest.items() if norm == 0.0)
