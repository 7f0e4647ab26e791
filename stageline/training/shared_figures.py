"""The named figures of a step's loss, from the last stage to all ranks.

Only the last stage learns what they are called, when it calls the loss; the names are told once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stageline import progress
from stageline.training.replicas import Replicas


class SharedFigures:
    """Adds scalars up over the ranks of a pipeline and its replicas; every rank calls this.

    Args:
        group: of the pipeline.
        device: where tensors lie that are sent.

    Attributes:
        names: of figures, known on all ranks, in one order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, replicas: Replicas, device: torch.device
    ) -> None:
        self.group = group
        self.replicas = replicas
        self.device = device
        self.names: list[str] = []

    def sum(
        self, facts: Sequence[torch.Tensor], figures: Mapping[str, torch.Tensor]
    ) -> tuple[list[float], dict[str, float]]:
        """Sums of scalars that every rank has, and of figures that some have.

        One exchange; in a step with figures that are new another two.
        """
        is_new = torch.tensor(float(any(name not in self.names for name in figures)))
        found = self._sum([*facts, is_new, *self._values(figures)])
        values = found[len(facts) + 1 :]
        if found[len(facts)] > 0:
            self._tell_names(list(figures))
            values = self._sum(self._values(figures))
        return found[: len(facts)], dict(zip(self.names, values, strict=True))

    def _values(self, figures: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [figures.get(name, torch.zeros(())) for name in self.names]

    def _sum(self, values: Sequence[torch.Tensor]) -> list[float]:
        total = torch.stack([value.detach().to(self.device) for value in values])
        with progress.doing("the other ranks at the end of a step", is_waiting=True):
            dist.all_reduce(total, group=self.group)
            if self.replicas.size > 1:
                dist.all_reduce(total, group=self.replicas.group)
            return total.tolist()

    def _tell_names(self, own: list[str]) -> None:
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, own, group=self.group)
        told = [name for names in gathered for name in names]
        told = [name for names in self.replicas.gather(told) for name in names]
        self.names = list(dict.fromkeys([*self.names, *told]))
