"""Rows of one or more data sets as one map-style dataset; rows lie in mapped files."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy

from stageline.data.sets.one_set import OneSet

VERSION = 1  # of how rows are drawn and converted


class SetsDataset:
    """Some rows of several sets, in a given order.

    Args:
        order: numbers of rows; those of the second set are numbered after the first's.
    """

    def __init__(self, sets: Sequence[OneSet], order: numpy.ndarray) -> None:
        self.sets = list(sets)
        self.order = order
        self._starts = numpy.cumsum([0, *(len(one) for one in sets)])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        one, row = self._place(index)
        return one[row]

    def describe(self, index: int) -> str:
        """File and line of a row."""
        one, row = self._place(index)
        return one.describe(row)

    def fingerprint(self) -> str:
        """Tells whether another dataset has the same rows, wherever its files lie."""
        digest = hashlib.sha256(f"sets {VERSION}".encode())
        for one in self.sets:
            for fact in one.facts():
                digest.update(f" {fact}".encode())
        digest.update(self.order.tobytes())
        return digest.hexdigest()

    def rows(self) -> numpy.ndarray:
        """A number for each row: equal where the same row of a file came twice."""
        ends = numpy.cumsum([0, *(one.num_read for one in self.sets)])
        numbers = [one.rows + end for one, end in zip(self.sets, ends, strict=False)]
        return numpy.concatenate(numbers)[self.order]

    def _place(self, index: int) -> tuple[OneSet, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self.order[index])
        one = int(numpy.searchsorted(self._starts, number, side="right")) - 1
        return self.sets[one], number - int(self._starts[one])
