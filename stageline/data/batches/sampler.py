"""Assign rows to optimizer steps; groups of rows stay together. No row is read.

The order depends on the seed and the step only, so all stages of a pipeline agree without messages,
and a run continues from any step. `group_size` consecutive rows of a dataset part are compared with
each other and stay together; it is 1 where rows are independent.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.errors import UserError

_GOLDEN = (5**0.5 - 1) / 2  # its multiples fill 0 to 1 evenly, and repeat nothing


def is_stream(dataset: object) -> bool:
    """Tell whether a dataset has positions of an endless stream instead of rows in any order."""
    return bool(getattr(dataset, "is_stream", False))


def has_sampler(dataset: object) -> bool:
    """Tell whether a dataset draws its training rows itself.

    Its part offers `make_sampler(*, batch_size, step_samples, dp_rank, dp_degree, seed, shuffle,
    start_step, position)`: an object with `len` (steps of an epoch) and `shares(start_step)` as
    StepSampler has. With a `state_after(step)`, what that gives is saved with a checkpoint, and
    comes back as the `position` of `start_step` (else it is None).
    """
    return hasattr(dataset, "make_sampler")


@dataclass
class StepSampler:
    """Draws the rows of each optimizer step; groups of rows stay together, in their order.

    In training the rows left over at the end of an epoch are left out, or the last step is filled
    with the first rows of the epoch. In evaluation each row comes once, and None fills up the last
    step. `num_samples` and `step_samples` are multiples of `group_size`.
    """

    num_samples: int
    _: KW_ONLY
    step_samples: int  # rows of one optimizer step of one replica
    dp_rank: int = 0
    dp_degree: int = 1
    seed: int = 0
    shuffle: bool = True  # another order in each epoch; else that of the dataset
    eval: bool = False  # each row once, instead of whole steps
    pads: bool = False  # fill the last step of an epoch, as torch's DistributedSampler does
    group_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_degree
        assert self.num_samples % self.group_size == self.step_samples % self.group_size == 0
        if len(self) == 0:
            raise UserError(
                f"the dataset has {self.num_samples} rows, one optimizer step takes "
                f"{self._global_samples} (`batch_size` x `accumulate_steps` x {self.dp_degree} "
                "data parallel replicas). Lower `batch_size`, give more rows, or use `rows.last` "
                "pad."
            )

    @property
    def _global_samples(self) -> int:
        return self.step_samples * self.dp_degree

    def __len__(self) -> int:
        """Return the steps of one epoch."""
        if self.eval or self.pads:
            return -(-self.num_samples // self._global_samples)
        return self.num_samples // self._global_samples

    def epoch_shares(self) -> Iterator[list[list[int | None]]]:
        """Yield the steps of the first epoch, with the rows of every replica."""
        return itertools.islice(self.shares(), len(self))

    def shares(self, start_step: int = 0) -> Iterator[list[list[int | None]]]:
        """Yield all steps from `start_step` on, epoch after epoch, with the rows of every replica.

        Those of a replica are neighbours, so that replicas join to one batch.
        """
        epoch, first = divmod(start_step, len(self))
        while True:
            order = self.order(epoch)
            if self.pads:  # behind the last row the first ones
                places = range(len(self) * self._global_samples)
                order = [order[place % self.num_samples] for place in places]
            for step in range(first, len(self)):
                begin = step * self._global_samples
                shares = []
                for start in range(begin, begin + self._global_samples, self.step_samples):
                    rows: list[int | None] = [*order[start : start + self.step_samples]]
                    shares.append(rows + [None] * (self.step_samples - len(rows)))
                yield shares
            epoch, first = epoch + 1, 0

    def order(self, epoch: int) -> list[int]:
        """Return all rows in the order of an epoch."""
        if not self.shuffle:
            return list(range(self.num_samples))
        # not seed + epoch: run 1's first epoch would be run 0's second
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        num_groups = self.num_samples // self.group_size
        groups = torch.randperm(num_groups, generator=generator).tolist()
        return expand(groups, self.group_size)


class StreamSampler(StepSampler):
    """Positions of a stream, which shuffles by itself and has no end: each once, in order."""

    def shares(self, start_step: int = 0) -> Iterator[list[list[int | None]]]:
        """Yield all steps, without epochs."""
        for step in itertools.count(start_step):
            first = step * self._global_samples
            yield [
                list(range(start, start + self.step_samples))
                for start in range(first, first + self._global_samples, self.step_samples)
            ]


def group_size_of(dataset: Any) -> int:
    """Return the rows of a group; 1 where a dataset has none."""
    if isinstance(dataset, Subset):  # made of whole groups, by `whole_groups` and `some_rows`
        return group_size_of(dataset.dataset)
    size = getattr(dataset, "group_size", 1)
    if not isinstance(size, int) or size < 1 or len(dataset) % size:
        raise UserError(
            f"the dataset {type(dataset).__name__} has {len(dataset)} rows and group_size "
            f"{size!r}, the number of rows that are a group. Correct the dataset part."
        )
    return size


def check_batch_sizes(
    *, batch_size: int, micro_batch_size: int, group_size: int, is_packed: bool = False
) -> None:
    """Refuse batches that would cut groups."""
    if group_size == 1:
        return
    if is_packed:
        raise UserError(
            f"`packing` does not work with a dataset of groups of {group_size} samples, which stay "
            "together in a micro-batch. Leave `packing` out."
        )
    if batch_size % group_size or micro_batch_size % group_size:
        raise UserError(
            f"`batch_size` {batch_size} and `micro_batch_size` {micro_batch_size} do not both hold "
            f"whole groups of {group_size} samples. Set both to multiples of {group_size}."
        )


def whole_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """Return all rows of the groups that the given rows are in, in order."""
    return expand(sorted({row // group_size for row in rows}), group_size)


def full_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """Return the rows of those groups of which all rows are given, in order."""
    counts = Counter(row // group_size for row in rows)
    return expand(sorted(group for group in counts if counts[group] == group_size), group_size)


def expand(groups: Sequence[int], group_size: int) -> list[int]:
    """Return the rows of groups, in the order of the groups."""
    return [group * group_size + place for group in groups for place in range(group_size)]


def some_rows(dataset: Any, count: int) -> Subset:
    """Return at most `count` rows, spread over the set, in whole groups (at least one).

    One of each of `count` equal stretches, and not at the same place of each: where rows take
    turns (tasks, kinds), every k-th row may be of one kind only.
    """
    size = group_size_of(dataset)
    total = len(dataset) // size
    wanted = min(max(count // size, 1), total)
    groups = []
    for stretch in range(wanted):
        first, end = (total * edge // wanted for edge in (stretch, stretch + 1))
        groups.append(first + int(_GOLDEN * stretch % 1 * (end - first)))
    return Subset(dataset, expand(groups, size))
