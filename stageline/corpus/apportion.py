"""How many rows of each type go into each batch of a mixture. Pure integers, any batch at once.

Fixed counts are the same in every batch. Of weights, each batch takes the whole part of every
type's share; the places that are left go to rows in the order in which they are due: row j of type
t is due at (j + phase of t) / (what is left of t's share). So each type comes at an even pace, and
what it gave before batch n is a closed form: all rows due by a time, and a few more or less, so
that the batches are full.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


class Apportionment:
    """The rows of each type in the first n batches.

    Args:
        whole: rows of each type that every batch takes.
        weights: in what proportion the types share the rest of a batch.
        batch: rows of a batch.
    """

    def __init__(self, whole: Sequence[int], weights: Sequence[int], batch: int) -> None:
        assert len(whole) == len(weights)
        self.whole = list(whole)
        self.weights = list(weights)
        self.batch = batch
        self._rest = batch - sum(whole)
        self._total = sum(weights)
        assert self._rest == 0 or self._rest > 0 and self._total > 0
        self._last: tuple[int, list[int]] = (0, [0] * len(self.whole))

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> "Apportionment":
        """The same counts in every batch."""
        return cls(counts, [0] * len(counts), sum(counts))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], batch: int) -> "Apportionment":
        """In proportion to sizes; the types end together, in the batch that takes the last row."""
        return cls([0] * len(sizes), sizes, batch)

    @classmethod
    def of_weights(cls, weights: Sequence[float], batch: int) -> "Apportionment":
        """In proportion to weights, taken as the decimal numbers they are written as.

        With two types a batch differs by less than one row from its share, and so does the sum of
        all batches so far. With more types a batch differs by less than two, and the sum by a few
        rows, however many batches there were.
        """
        exact = [Fraction(repr(weight)) for weight in weights]
        shares = [weight / sum(exact) * batch for weight in exact]
        whole = [math.floor(share) for share in shares]
        rests = [share - floor for share, floor in zip(shares, whole, strict=True)]
        unit = math.lcm(*(rest.denominator for rest in rests))
        return cls(whole, [int(rest * unit) for rest in rests], batch)

    def has_share(self, kind: int) -> bool:
        """Whether any row of this type is ever taken."""
        return bool(self.whole[kind] or self.weights[kind])

    def share(self, kind: int) -> Fraction:
        """Rows of this type in a batch, on the average."""
        rest = Fraction(self._rest * self.weights[kind], self._total) if self._rest else 0
        return self.whole[kind] + Fraction(rest)

    def before(self, num_batches: int) -> list[int]:
        """Rows of each type in this many batches from the first on."""
        if self._last[0] != num_batches:  # batch n + 1 begins where batch n ends
            by_due = self._by_due(num_batches * self._rest)
            rows = [
                num_batches * whole + due for whole, due in zip(self.whole, by_due, strict=True)
            ]
            self._last = (num_batches, rows)
        return self._last[1]

    def _by_due(self, num_rows: int) -> list[int]:
        """How many rows of each type are among the first `num_rows` that are due."""
        if num_rows == 0:
            return [0] * len(self.weights)
        taken = [self._due_before(kind, num_rows) for kind in range(len(self.weights))]
        missing = num_rows - sum(taken)
        step = 1 if missing > 0 else -1  # take the next row due, or give back the last one
        first = 0 if missing > 0 else -1
        heap = [
            (step * self._due(kind, taken[kind] + first), step * kind)
            for kind in range(len(self.weights))
            if self.weights[kind] and taken[kind] + first >= 0
        ]
        heapq.heapify(heap)
        for _ in range(abs(missing)):
            kind = step * heap[0][1]
            taken[kind] += step
            if taken[kind] + first >= 0:
                following = (step * self._due(kind, taken[kind] + first), step * kind)
                heapq.heapreplace(heap, following)
            else:
                heapq.heappop(heap)
        return taken

    # phases (2t + 1) / 2k lie apart, so that many rare types are not all due at the same time

    def _due_before(self, kind: int, num_rows: int) -> int:
        """Rows of a type that are due before the time at which so many ought to be."""
        weight, num_kinds = self.weights[kind], len(self.weights)
        reached = 2 * num_kinds * num_rows * weight - (2 * kind + 1) * self._total
        return max(0, -(-reached // (2 * num_kinds * self._total))) if weight else 0

    def _due(self, kind: int, row: int) -> Fraction:
        num_kinds = len(self.weights)
        return Fraction(2 * num_kinds * row + 2 * kind + 1, 2 * num_kinds * self.weights[kind])
