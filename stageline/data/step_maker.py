"""Makes all micro-batches of one optimizer step: reads rows, arranges them by length, collates.

Runs in a worker process of the loader. Knows neither epochs nor seeds.
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
from stageline.data.lengths import Lengths, companion
from stageline.errors import UserError

MicroBatch = dict[str, torch.Tensor]
Shares = Sequence[Sequence[int | None]]  # the rows of each replica; None only fills up


class StepMaker(Dataset):
    """One sample a row, padded to the longest of its micro-batch.

    A collate part without a `length_of` gets the rows in the given order.

    Args:
        micro_batch_size: rows of a micro-batch; of sorted ones the mean.
        dp_rank: whose share is made.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[Sequence[Any]], MicroBatch],
        micro_batch_size: int,
        dp_rank: int = 0,
        is_sorted: bool = True,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.is_sorted = is_sorted
        length_of = companion(collate, "length_of")
        self.lengths = None if length_of is None else Lengths(dataset, length_of)

    def __getitem__(self, shares: Shares) -> list[MicroBatch] | Exception:
        try:
            return self.make(shares)
        except Exception as error:
            return error  # raised in a worker, its traceback would bury the message

    def make(self, shares: Shares) -> list[MicroBatch]:
        """The micro-batches of this replica."""
        rows = shares[self.dp_rank]
        items = [self.dataset[row or 0] for row in rows]
        return [
            self._collate([items[index] for index in group], [rows[index] for index in group])
            for group in self._groups(rows, items)
        ]

    def _groups(self, rows: Sequence[int | None], items: Sequence[Any]) -> list[list[int]]:
        if not self.is_sorted or self.lengths is None:
            return _consecutive(range(len(rows)), self.micro_batch_size)
        lengths = [self.lengths.of(row or 0, item) for row, item in zip(rows, items, strict=True)]
        return _in_order(group_by_length(lengths, len(rows) // self.micro_batch_size), lengths)

    def _collate(self, items: list[Any], rows: list[int | None]) -> MicroBatch:
        """A micro-batch; rows that only fill up get labels of -100.

        `loss_rows` says which row of the dataset each one is (-1: none); stages do not get it.
        """
        batch = self.collate(items)
        batch["labels"][torch.tensor([row is None for row in rows])] = IGNORE
        batch["loss_rows"] = torch.tensor([-1 if row is None else row for row in rows])
        return batch


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
        if packed is None or self.lengths is None:
            raise UserError(
                "--packing was given, and the chosen --collate-fn has no `packed` and `length_of`. "
                "Both were expected, because it decides how samples become rows: use --collate-fn "
                "sft, add the two functions (docs/add_a_part.md), or leave --packing out."
            )
        self.packed = packed

    def make(self, shares: Shares) -> list[MicroBatch]:
        assert not any(None in share for share in shares), "evaluation is not packed"
        rows = shares[self.dp_rank]
        items = [self.dataset[row] for row in rows]
        known = dict(zip(rows, items, strict=True))
        lengths = [[self.lengths.of(row, known.get(row)) for row in share] for share in shares]
        most_rows = max(len(pack(share, self.capacity)) for share in lengths)
        count = self.legal_counts(-(-most_rows // self.micro_batch_size))
        own = lengths[self.dp_rank]
        bins = pack_into(own, self.capacity, count * self.micro_batch_size)
        fill = [sum(own[index] for index in members) for members in bins]
        by_fill = sorted(range(len(bins)), key=lambda place: -fill[place])
        groups = _consecutive(by_fill, self.micro_batch_size)
        if self.is_sorted:
            groups = _in_order(groups, fill)
        return [
            {
                **self.packed([[items[index] for index in bins[place]] for place in group]),
                "loss_packed_rows": torch.tensor(
                    [rows[index] for place in group for index in bins[place]], dtype=torch.int64
                ),
            }
            for group in groups
        ]


def _consecutive(indices: Sequence[int], size: int) -> list[list[int]]:
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _in_order(groups: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    costs = [padded_cost([lengths[index] for index in group]) for group in groups]
    return [groups[place] for place in order_by_cost(costs)]
