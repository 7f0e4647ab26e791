"""Which rank of the pipeline owns which trainable parameter; keeps tied weights equal.

A weight that is tied across stages (embedding and head) lives on two ranks under one name. Its
gradients are exchanged and summed before each optimizer step, so that both copies take the same
step, and it counts once in a norm.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from stageline.modules.lora import is_lora_name, strip_lora


class Ownership:
    """Learned once, from the names that every rank of the pipeline trains.

    Args:
        named_parameters: this rank's trainable parameters by name.
        order: the whole model's parameter names in its own order. A LoRA comes with the layer
            it is on; other names that are not in it follow, by stage.
        stage_of: name -> stage, of this rank's names; None: a rank holds one stage.
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
        stage_of: Mapping[str, int] | None = None,
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
        stages: list[Mapping[str, int] | None] = [None] * len(names)
        dist.all_gather_object(stages, stage_of, group=group)
        position = _positions(order)
        # by stage, not by rank: with several stages a rank the two are different orders
        keys = [
            (
                position.get(_whole_name(name), len(order)),
                (stages[rank] or {}).get(name, rank),
                rank,
                index,
            )
            for rank, rank_names in enumerate(counted_by_rank)
            for index, name in enumerate(rank_names)
        ]
        places = {key[2:]: place for place, key in enumerate(sorted(keys))}
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


def _positions(order: list[str]) -> dict[str, int]:
    """Name of a parameter, or of a module with parameters of its own -> its place."""
    places = {name.rpartition(".")[0]: index for index, name in enumerate(order)}
    return {**places, **{name: index for index, name in enumerate(order)}}


def _whole_name(name: str) -> str:
    """Of a weight of an adapter, the module that it is on; else the name without adapters."""
    plain = strip_lora(name)
    return plain.rpartition(".lora.")[0] if is_lora_name(name) else plain
