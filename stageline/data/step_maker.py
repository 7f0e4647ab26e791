"""Makes all micro-batches of one optimizer step: reads rows, arranges them by length, collates.

Runs in a worker process of the loader, and draws the same random numbers in any. Knows no epochs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from stageline.data.arrange import (
    group_by_length,
    order_by_cost,
    pack,
    pack_into,
    padded_cost,
)
from stageline.data.batch import IGNORE
from stageline.data.groups import expand
from stageline.data.lengths import companion
from stageline.data.rows import Item, Rows
from stageline.data.workers import portable
from stageline.errors import UserError
from stageline.seeds import derive_seed, host_state_kept, seed_host

MicroBatch = dict[str, torch.Tensor]
Shares = Sequence[Sequence[int | None]]  # the rows of each replica; None only fills up


class StepMaker(Dataset):
    """One sample a row, padded to the longest of its micro-batch.

    A collate part without a `length_of` gets the rows in the given order.

    Args:
        micro_batch_size: rows of a micro-batch; of sorted ones the mean.
        dp_rank: whose share is made.
        seed: of what rows and the collate part draw at random.
        group_size: so many consecutive rows of a share stay together, in their order.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[Sequence[Any]], MicroBatch],
        micro_batch_size: int,
        dp_rank: int = 0,
        is_sorted: bool = True,
        seed: int = 0,
        group_size: int = 1,
    ) -> None:
        self.collate = collate
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.is_sorted = is_sorted
        self.seed = seed
        self.group_size = group_size
        length_of = companion(collate, "length_of")
        self.knows_lengths = length_of is not None
        self.rows = Rows(dataset, length_of, seed=seed)

    def __getitem__(self, request: tuple[int, Shares]) -> list[MicroBatch] | Exception:
        try:
            with host_state_kept():
                return self.make(*request)
        except Exception as error:
            return portable(error)  # raised in a worker, its traceback would bury the message

    def make(self, step: int, shares: Shares) -> list[MicroBatch]:
        """The micro-batches of this replica."""
        rows = shares[self.dp_rank]
        items = self._read(step, shares)
        groups = self._groups(step, shares, items)
        made = []
        for place, group in enumerate(groups):
            self._seed_micro_batch(step, place, of=len(groups))
            made.append(
                self._collate([items[index] for index in group], [rows[index] for index in group])
            )
        return made

    def _read(self, step: int, shares: Shares) -> list[Item]:
        first = _first_place(shares, self.dp_rank)
        return [
            self.rows.read(self._row(row, index), step, first + index)
            for index, row in enumerate(shares[self.dp_rank])
        ]

    def _lengths(
        self, step: int, shares: Shares, replica: int, items: Sequence[Item | None]
    ) -> list[int]:
        first = _first_place(shares, replica)
        return [
            self.rows.length(self._row(row, index), step, first + index, items[index])
            for index, row in enumerate(shares[replica])
        ]

    def _row(self, row: int | None, index: int) -> int:
        """The row to read; what only fills up is the dataset's first group, a whole one."""
        return index % self.group_size if row is None else row

    def _seed_micro_batch(self, step: int, place: int, *, of: int) -> None:
        """For what the collate part draws; all replicas make `of` micro-batches."""
        seed_host(derive_seed(self.seed, "micro-batch", step, self.dp_rank * of + place))

    def _groups(self, step: int, shares: Shares, items: Sequence[Item]) -> list[list[int]]:
        rows = shares[self.dp_rank]
        if not self.is_sorted or not self.knows_lengths:
            return _consecutive(range(len(rows)), self.micro_batch_size)
        lengths = self._lengths(step, shares, self.dp_rank, items)
        # a group moves as one, as long as its longest row
        longest = [max(unit) for unit in _consecutive(lengths, self.group_size)]
        made = group_by_length(longest, len(rows) // self.micro_batch_size)
        return [expand(units, self.group_size) for units in _in_order(made, longest)]

    def _collate(self, items: list[Any], rows: list[int | None]) -> MicroBatch:
        """A micro-batch; rows that only fill up get labels of -100.

        `loss_rows` says which row of the dataset each one is (-1: none); stages do not get it. Of
        rows that hold several samples `loss_packed_rows` says it of each sample. A collate part
        may make several rows of each sample, next to each other.
        """
        batch = self.collate(items)
        times, rest = divmod(len(batch["labels"]), len(rows))
        assert times and not rest, f"{len(rows)} samples became {len(batch['labels'])} rows"
        rows = [row for row in rows for _ in range(times)]
        batch["labels"][torch.tensor([row is None for row in rows])] = IGNORE
        numbers = torch.tensor([-1 if row is None else row for row in rows])
        if "sample_ids" not in batch:
            return {**batch, "loss_rows": numbers}
        counts = batch["sample_ids"].amax(dim=1) + 1  # samples of each row, which was packed so
        return {**batch, "loss_packed_rows": numbers.repeat_interleave(counts)}


class PackedStepMaker(StepMaker):
    """Several samples a row. All replicas make the same number of micro-batches.

    `loss_packed_rows` says which rows of the dataset are in a micro-batch; stages do not get it.

    Each replica computes the lengths of all replicas' rows, so that none has to ask another.

    Args:
        capacity: tokens of a row.
        legal_counts: rounds a number of micro-batches up to one that the schedule can run.

    Raises:
        UserError: the collate part cannot pack.
    """

    def __init__(
        self, dataset: Any, *, capacity: int, legal_counts: Callable[[int], int], **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self.capacity = capacity
        self.legal_counts = legal_counts
        packed = companion(self.collate, "packed")
        if packed is None or not self.knows_lengths:
            raise UserError(
                "--packing was given, and the chosen --collate-fn has no `packed` and `length_of`. "
                "Both were expected, because it decides how samples become rows: use --collate-fn "
                "sft, add the two functions (docs/add_a_part.md), or leave --packing out."
            )
        self.packed = packed

    def make(self, step: int, shares: Shares) -> list[MicroBatch]:
        assert not any(None in share for share in shares), "evaluation is not packed"
        rows, items = shares[self.dp_rank], self._read(step, shares)
        unread = [None] * len(items)
        lengths = [
            self._lengths(step, shares, replica, items if replica == self.dp_rank else unread)
            for replica in range(len(shares))
        ]
        most_rows = max(len(pack(share, self.capacity)) for share in lengths)
        count = self.legal_counts(-(-most_rows // self.micro_batch_size))
        own = lengths[self.dp_rank]
        bins = pack_into(own, self.capacity, count * self.micro_batch_size)
        fill = [sum(own[index] for index in members) for members in bins]
        by_fill = sorted(range(len(bins)), key=lambda place: -fill[place])
        groups = _consecutive(by_fill, self.micro_batch_size)
        if self.is_sorted:
            groups = _in_order(groups, fill)
        made = []
        for place, group in enumerate(groups):
            self._seed_micro_batch(step, place, of=count)
            batch = self.packed([[items[index] for index in bins[row]] for row in group])
            members = [rows[index] for row in group for index in bins[row]]
            made.append({**batch, "loss_packed_rows": torch.tensor(members, dtype=torch.int64)})
        return made


def _first_place(shares: Shares, replica: int) -> int:
    return sum(len(share) for share in shares[:replica])


def _consecutive(indices: Sequence[int], size: int) -> list[list[int]]:
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _in_order(groups: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    costs = [padded_cost([lengths[index] for index in group]) for group in groups]
    return [groups[place] for place in order_by_cost(costs)]
