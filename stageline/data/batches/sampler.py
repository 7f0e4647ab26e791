"""Which rows belong to which optimizer step; groups of rows stay together. Reads no row.

Depends on the seed and the step alone, so all stages of a pipeline agree without talking, and a
run goes on from any step. Only data parallel replicas get different rows.

A dataset part with groups has `group_size`: so many consecutive rows are compared with each other
and belong together. Others have groups of one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.errors import UserError

_GOLDEN = (5**0.5 - 1) / 2  # its multiples fill 0 to 1 evenly, and repeat nothing


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

    In training the rows left over at the end of an epoch are left out, or the last step is filled
    with the first rows of the epoch; another order puts others there. In evaluation each row comes
    once, and None fills up the last step.

    Args:
        num_samples: rows of the dataset.
        step_samples: rows of one optimizer step of one replica.
        dp_rank, dp_degree: this replica and how many there are.
        seed: of the order; the epoch is added to it.
        shuffle: another order in each epoch; else that of the dataset.
        eval: each row once, instead of whole steps.
        pads: fills the last step of an epoch, as torch's DistributedSampler fills the last batch.
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
        pads: bool = False,
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
        self.pads = pads
        self.group_size = group_size
        if len(self) == 0:
            raise UserError(
                f"the dataset has {num_samples} rows, one optimizer step takes "
                f"{self._global_samples} (`batch_size` x `accumulate_steps` x {dp_degree} data "
                "parallel replicas). Lower `batch_size`, give more rows, or use `rows.last` pad."
            )

    @property
    def _global_samples(self) -> int:
        return self.step_samples * self.dp_degree

    def __len__(self) -> int:
        """Steps of one epoch."""
        if self.eval or self.pads:
            return -(-self.num_samples // self._global_samples)
        return self.num_samples // self._global_samples

    def epoch_shares(self) -> Iterator[list[list[int | None]]]:
        """The steps of the first epoch, with the rows of every replica."""
        return itertools.islice(self.shares(), len(self))

    def shares(self, start_step: int = 0) -> Iterator[list[list[int | None]]]:
        """All steps from `start_step` on, epoch after epoch, with the rows of every replica."""
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
            if self.pads:
                places = range(start, start + self.step_samples)
                rows = [order[place % self.num_samples] for place in places]
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


def group_size_of(dataset: Any) -> int:
    """Rows of a group; 1 where a dataset has none.

    Raises:
        UserError: `group_size` is no such number, or the last group is not whole.
    """
    if isinstance(dataset, Subset):  # made of whole groups, by `whole_groups` and `some_rows`
        return group_size_of(dataset.dataset)
    size = getattr(dataset, "group_size", 1)
    name = type(dataset).__name__
    if not isinstance(size, int) or size < 1:
        raise UserError(
            f"the dataset {name} has group_size {size!r}. Give the dataset part a number from 1 "
            "upwards: so many consecutive rows are a group."
        )
    if len(dataset) % size:
        raise UserError(
            f"the dataset {name} has {len(dataset)} rows in groups of {size}, so the last group is "
            "not whole. Correct the dataset part."
        )
    return size


def check_batch_sizes(
    *, batch_size: int, micro_batch_size: int, group_size: int, is_packed: bool = False
) -> None:
    """Refuses batches that would cut groups.

    Raises:
        UserError: names both numbers and the legal ones near them.
    """
    if group_size == 1:
        return
    if is_packed:
        raise UserError(
            f"`packing` came with a dataset of groups of {group_size} samples, which have to stay "
            "next to each other in a micro-batch. Leave `packing` out."
        )
    if batch_size % group_size == 0 and micro_batch_size % group_size == 0:
        return

    def near(number: int, divisor: int) -> list[int]:
        """The multiples below and above a number; itself where it is one."""
        return sorted({number // divisor * divisor, -(-number // divisor) * divisor} - {0})

    legal = [
        f"`micro_batch_size` {micro} with `batch_size` "
        f"{' or '.join(map(str, near(batch_size, micro)))}"
        for micro in near(micro_batch_size, group_size)
    ]
    raise UserError(
        f"`batch_size` {batch_size} and `micro_batch_size` {micro_batch_size} do not both hold "
        f"whole groups of {group_size} samples, which travel in one micro-batch. Set "
        f"{', or '.join(legal)}."
    )


def whole_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """All rows of the groups that the given rows are in, in order."""
    groups = sorted({row // group_size for row in rows})
    return expand(groups, group_size)


def full_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """The rows of those groups that all rows of are given, in order."""
    counts = Counter(row // group_size for row in rows)
    return expand(sorted(group for group in counts if counts[group] == group_size), group_size)


def expand(groups: Sequence[int], group_size: int) -> list[int]:
    """The rows of groups, in the order of the groups."""
    if group_size == 1:
        return list(groups)
    return [group * group_size + place for group in groups for place in range(group_size)]


def some_rows(dataset: Any, count: int) -> Subset:
    """At most `count` rows, spread over the set; of groups whole ones, at least one.

    One of each of `count` equal stretches, and not at the same place of each: sets whose rows take
    turns (tasks, kinds) would give every k-th row, which may be one kind alone.
    """
    size = group_size_of(dataset)
    total = len(dataset) // size
    wanted = min(max(count // size, 1), total)
    groups = []
    for stretch in range(wanted):
        first, end = (total * edge // wanted for edge in (stretch, stretch + 1))
        groups.append(first + int(_GOLDEN * stretch % 1 * (end - first)))
    return Subset(dataset, expand(groups, size))
