"""Which rows belong to which optimizer step. Pure integers: knows neither datasets nor ranks.

Depends on the seed and the step alone, so all stages of a pipeline agree without talking, and a
run goes on from any step. Only data parallel replicas get different rows.
"""

import itertools
from collections.abc import Iterator

import torch

from stageline.data.batches.groups import expand
from stageline.errors import UserError


def is_stream(dataset: object) -> bool:
    """Whether a dataset has positions of an endless stream instead of rows in any order."""
    return bool(getattr(dataset, "is_stream", False))


def has_sampler(dataset: object) -> bool:
    """Whether a dataset draws its training rows itself.

    Its part offers `make_sampler(*, batch_size, step_samples, dp_rank, dp_degree, seed, shuffle,
    start_step, position)`: an object with `len` (steps of an epoch) and `shares(start_step)` as
    StepSampler has. With a `state_after(step)`, what that gives is saved with a checkpoint, and
    comes back as the `position` of `start_step` (else it is None).
    """
    return hasattr(dataset, "make_sampler")


class StepSampler:
    """Draws the rows of each optimizer step; groups of rows stay together, in their order.

    In training the rows left over at the end of an epoch are left out; another order puts others
    there. In evaluation each row comes once, and None fills up the last step.

    Args:
        num_samples: rows of the dataset.
        step_samples: rows of one optimizer step of one replica.
        dp_rank, dp_degree: this replica and how many there are.
        seed: of the order; the epoch is added to it.
        shuffle: another order in each epoch; else that of the dataset.
        eval: each row once, instead of whole steps.
        group_size: rows of a group; `num_samples` and `step_samples` are multiples of it.

    Raises:
        UserError: there are not enough rows for one step of training, or none at all.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        step_samples: int,
        dp_rank: int = 0,
        dp_degree: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        eval: bool = False,
        group_size: int = 1,
    ) -> None:
        assert 0 <= dp_rank < dp_degree
        assert num_samples % group_size == step_samples % group_size == 0
        self.num_samples = num_samples
        self.step_samples = step_samples
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.seed = seed
        self.shuffle = shuffle
        self.eval = eval
        self.group_size = group_size
        self.epoch = 0
        if len(self) == 0:
            raise UserError(
                f"the dataset has {num_samples} rows, one optimizer step takes "
                f"{self._global_samples} (`batch_size` x `accumulate_steps` x {dp_degree} data "
                "parallel replicas). At least one step was expected, because training uses whole "
                "steps only: lower `batch_size` or give more rows."
            )

    @property
    def _global_samples(self) -> int:
        return self.step_samples * self.dp_degree

    def __len__(self) -> int:
        """Steps of one epoch."""
        if self.eval:
            return -(-self.num_samples // self._global_samples)
        return self.num_samples // self._global_samples

    def set_epoch(self, epoch: int) -> None:
        """The epoch that iterating goes through."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int | None]]:
        """The steps of one epoch."""
        return (shares[self.dp_rank] for shares in self.epoch_shares())

    def steps(self, start_step: int = 0) -> Iterator[list[int | None]]:
        """All steps from `start_step` on, epoch after epoch, without end."""
        return (shares[self.dp_rank] for shares in self.shares(start_step))

    def epoch_shares(self) -> Iterator[list[list[int | None]]]:
        """The steps of one epoch, with the rows of every replica."""
        order = self.order(self.epoch)
        return (self._shares(order, step) for step in range(len(self)))

    def shares(self, start_step: int = 0) -> Iterator[list[list[int | None]]]:
        """As `steps`, with the rows of every replica."""
        epoch, first = divmod(start_step, len(self))
        while True:
            order = self.order(epoch)
            for step in range(first, len(self)):
                yield self._shares(order, step)
            epoch, first = epoch + 1, 0

    def order(self, epoch: int) -> list[int]:
        """All rows in the order of an epoch."""
        if not self.shuffle:
            return list(range(self.num_samples))
        # not seed + epoch: run 1's first epoch would be run 0's second
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        num_groups = self.num_samples // self.group_size
        groups = torch.randperm(num_groups, generator=generator).tolist()
        return expand(groups, self.group_size)

    def _shares(self, order: list[int], step: int) -> list[list[int | None]]:
        """Each replica's rows of one step: neighbours, so that replicas join to one batch."""
        first = step * self._global_samples
        shares = []
        for start in range(first, first + self._global_samples, self.step_samples):
            rows: list[int | None] = list(order[start : start + self.step_samples])
            shares.append(rows + [None] * (self.step_samples - len(rows)))
        return shares


class StreamSampler(StepSampler):
    """Positions of a stream, which shuffles by itself and has no end: each once, in order."""

    def shares(self, start_step: int = 0) -> Iterator[list[list[int | None]]]:
        """As of a dataset, without epochs."""
        for step in itertools.count(start_step):
            first = step * self._global_samples
            yield [
                list(range(start, start + self.step_samples))
                for start in range(first, first + self._global_samples, self.step_samples)
            ]
