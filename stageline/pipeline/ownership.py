"""Which rank of the pipeline owns which trainable parameter; keeps tied weights equal.

A weight that is tied across stages (embedding and head) lives on two ranks under one name. Its
gradients are exchanged and summed before each optimizer step, so that both copies take the same
step, and it counts once in a norm.
"""

import torch
import torch.distributed as dist
from torch import nn

from stageline.modules.lora import wrapped_module


class Ownership:
    """Learned once, from the names that every rank of the pipeline trains.

    Args:
        named_parameters: this rank's trainable parameters by name.
        order: the whole model's parameter names in its own order; those of adapters, which are
            not in it, stand beside the layer that they wrap.
        group: the pipeline's process group.

    Attributes:
        counted: this rank's names that count in a norm: all but later copies of tied weights.
        model_order: for every rank, where its counted parameters stand in the whole model's order.
    """

    def __init__(
        self,
        named_parameters: dict[str, nn.Parameter],
        *,
        order: list[str],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
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
        position = _Positions(order)
        keys = [
            (position[name], rank, index)
            for rank, rank_names in enumerate(counted_by_rank)
            for index, name in enumerate(rank_names)
        ]
        places = {key[1:]: place for place, key in enumerate(sorted(keys))}
        self.model_order = [
            [places[rank, index] for index in range(len(rank_names))]
            for rank, rank_names in enumerate(counted_by_rank)
        ]

    def sum_tied_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Adds up the gradients of tied weights over the stages that hold a copy."""
        for name, ranks in self.tied.items():
            if self.rank not in ranks:
                continue
            parameter = parameters[name]
            if parameter.numel() == 0:
                continue  # a share of a weight with fewer rows than replicas; peers have the same
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            received = self._exchange(own.contiguous(), [r for r in ranks if r != self.rank])
            copies = {**received, self.rank: own}
            # in the order of the stages on every rank, so that the sums are equal to the bit
            total = copies[ranks[0]].clone()
            for rank in ranks[1:]:
                total += copies[rank]
            parameter.grad = total

    def _exchange(self, own: torch.Tensor, peers: list[int]) -> dict[int, torch.Tensor]:
        received = {peer: torch.empty_like(own) for peer in peers}
        ops = []
        for peer, buffer in received.items():
            global_peer = peer if self.group is None else dist.get_global_rank(self.group, peer)
            ops.append(dist.P2POp(dist.isend, own, global_peer, self.group))
            ops.append(dist.P2POp(dist.irecv, buffer, global_peer, self.group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received


class _Positions:
    """Where a parameter, or the layer that an adapter wraps, stands in the whole model."""

    def __init__(self, order: list[str]) -> None:
        self._names = {name: index for index, name in enumerate(order)}
        self._modules: dict[str, int] = {}
        for index, name in enumerate(order):
            self._modules.setdefault(name.rpartition(".")[0], index)
        self._end = len(order)

    def __getitem__(self, name: str) -> int:
        if name in self._names:
            return self._names[name]
        return self._modules.get(wrapped_module(name), self._end)
