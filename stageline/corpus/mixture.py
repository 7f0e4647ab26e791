"""Mix types of rows into batches in fixed proportions, each type in an order of its own.

Any batch of any epoch is computed from the seed only, in time and memory of one batch. The
sequence depends on sizes, proportions, batch, seed and drop mode; not on how many replicas share a
batch, how many batches make a step, how many processes load, or how long the run is.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy

from stageline.errors import UserError
from stageline.seeds import derive_seed

# Permutations that are computed, not stored: any place of an order of any size, in O(1) memory. A
# Feistel network over a rectangle of just the size: a place is (left, right), and in turn one
# half is shifted by a hash of the other, which can be undone, so no two places meet. A place in
# the few cells beyond `size` is shuffled again until it is inside (cycle walking).
# Integers only: the same on every machine and in every version of NumPy.

_ROUNDS = 16  # at fewer, some orders of four to seven things come more often than others
_GOLDEN = 0x9E3779B97F4A7C15
_SHIFTS = tuple(numpy.uint64(shift) for shift in (30, 27, 31))
_FACTORS = tuple(numpy.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def permute(places: numpy.ndarray, sizes: numpy.ndarray, seeds: numpy.ndarray) -> numpy.ndarray:
    """Permute places (int64 [N], each below its size) by the orders of their sizes and seeds."""
    places, sizes, seeds = numpy.broadcast_arrays(places, sizes, seeds)
    assert ((places >= 0) & (places < sizes)).all()
    sizes, keys = sizes.astype(numpy.uint64), _hash(seeds.astype(numpy.uint64))
    widths = numpy.ceil(numpy.sqrt(sizes)).astype(numpy.uint64)
    widths += widths % numpy.uint64(2)  # shifts along an odd width make only even permutations
    heights = (sizes + widths - numpy.uint64(1)) // widths
    numbers = _shuffled(places.astype(numpy.uint64), widths, heights, keys)
    outside = numpy.flatnonzero(numbers >= sizes)
    while len(outside):
        walked = _shuffled(numbers[outside], widths[outside], heights[outside], keys[outside])
        numbers[outside] = walked
        outside = outside[walked >= sizes[outside]]
    return numbers.astype(numpy.int64)


def _shuffled(
    cells: numpy.ndarray, widths: numpy.ndarray, heights: numpy.ndarray, keys: numpy.ndarray
) -> numpy.ndarray:
    """Permute all cells of a rectangle of `widths` x `heights`."""
    left, right = cells // heights, cells % heights
    for turn in range(0, _ROUNDS, 2):
        left = (left + _hash(right + _round_key(keys, turn)) % widths) % widths
        right = (right + _hash(left + _round_key(keys, turn + 1)) % heights) % heights
    return left * heights + right


def _round_key(keys: numpy.ndarray, turn: int) -> numpy.ndarray:
    # halves are far below 2**32, so rounds share no input of the hash
    return keys ^ numpy.uint64((turn + 1) * _GOLDEN % 2**64)


def _hash(values: numpy.ndarray) -> numpy.ndarray:
    """Hash as SplitMix64 does; arithmetic wraps around at 2**64."""
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])


class Apportionment:
    """The rows of each type in the first n batches of a mixture; any batch at once.

    Fixed counts are the same in every batch. With weights, each batch takes the whole part of every
    type's share; the remaining places go to rows in the order in which they are due: row j of type
    t is due at (j + phase of t) / (what is left of t's share). So the rows that a type gave before
    batch n have a closed form: all rows due by a time, and a few more or less to fill the batches.

    Args:
        whole: rows of each type that every batch takes.
        weights: in what proportion the types share the rest of a batch.
    """

    def __init__(self, whole: Sequence[int], weights: Sequence[int], batch: int) -> None:
        assert len(whole) == len(weights)
        self.whole = list(whole)
        self.weights = list(weights)
        self._rest = batch - sum(whole)
        self._total = sum(weights)
        assert self._rest == 0 or self._rest > 0 and self._total > 0
        self._last: tuple[int, list[int]] = (0, [0] * len(self.whole))

    @classmethod
    def of_weights(cls, weights: Sequence[float], batch: int) -> "Apportionment":
        """Apportion by weights, which are read as the decimal numbers they are written as.

        With two types a batch, and the sum of all so far, differs by less than one row from its
        share; with more types a batch by less than two, and the sum by a few.
        """
        exact = [Fraction(repr(weight)) for weight in weights]
        shares = [weight / sum(exact) * batch for weight in exact]
        whole = [math.floor(share) for share in shares]
        rests = [share - floor for share, floor in zip(shares, whole, strict=True)]
        unit = math.lcm(*(rest.denominator for rest in rests))
        return cls(whole, [int(rest * unit) for rest in rests], batch)

    def has_share(self, kind: int) -> bool:
        """Return whether any row of this type is ever taken."""
        return bool(self.whole[kind] or self.weights[kind])

    def share(self, kind: int) -> Fraction:
        """Return the average number of rows of this type in a batch."""
        rest = Fraction(self._rest * self.weights[kind], self._total) if self._rest else 0
        return self.whole[kind] + Fraction(rest)

    def before(self, num_batches: int) -> list[int]:
        """Return the rows of each type in the first `num_batches` batches."""
        if self._last[0] != num_batches:  # batch n + 1 begins where batch n ends
            by_due = self._by_due(num_batches * self._rest)
            pairs = zip(self.whole, by_due, strict=True)
            self._last = (num_batches, [num_batches * whole + due for whole, due in pairs])
        return self._last[1]

    def _by_due(self, num_rows: int) -> list[int]:
        """Return the number of rows of each type among the first `num_rows` that are due."""
        if num_rows == 0:
            return [0] * len(self.weights)
        taken = [self._due_before(kind, num_rows) for kind in range(len(self.weights))]
        drawn = [kind for kind, weight in enumerate(self.weights) if weight]
        while sum(taken) < num_rows:  # take the next row due
            _, kind = min((self._due(kind, taken[kind]), kind) for kind in drawn)
            taken[kind] += 1
        while sum(taken) > num_rows:  # give back the last one
            _, kind = max((self._due(kind, taken[kind] - 1), kind) for kind in drawn if taken[kind])
            taken[kind] -= 1
        return taken

    # phases (2t + 1) / 2k lie apart, so that many rare types are not all due at the same time

    def _due_before(self, kind: int, num_rows: int) -> int:
        """Return the rows of a type that are due before the time when `num_rows` rows are due."""
        weight, num_kinds = self.weights[kind], len(self.weights)
        reached = 2 * num_kinds * num_rows * weight - (2 * kind + 1) * self._total
        return max(0, -(-reached // (2 * num_kinds * self._total))) if weight else 0

    def _due(self, kind: int, row: int) -> Fraction:
        num_kinds = len(self.weights)
        return Fraction(2 * num_kinds * row + 2 * kind + 1, 2 * num_kinds * self.weights[kind])


# When an epoch of a mixture ends, where its types do not end together. A type whose rows are used
# up begins another order of the same rows (none comes a third time before each came twice).
#
# - `first_ends_drop` (0): the type whose rows suffice for the fewest batches ends the epoch, before
#   it would have to repeat one. Its rest that is smaller than its share is left out.
# - `first_ends_fill` (1): as before, but one more batch takes its rest, filled up to the share from
#   another order.
# - `last_ends_drop` (2): the type that suffices for the most batches ends the epoch; its rest that
#   is smaller than its share is left out. All others are seen whole and repeated until then.
# - `last_ends_fill` (3): as before, but the rest comes too, filled up from another order.
DROP_MODES = ("first_ends_drop", "first_ends_fill", "last_ends_drop", "last_ends_fill")


def as_drop_mode(value: str | int) -> str:
    """Return the drop mode of this name or number, or raise UserError."""
    modes = {str(number): mode for number, mode in enumerate(DROP_MODES)}
    mode = modes.get(str(value), str(value))
    if mode not in DROP_MODES:
        names = ", ".join(DROP_MODES)
        raise UserError(f"drop mode {value!r} is not known. Give one of {names}, or 0 to 3.")
    return mode


def _type_batches(shares: Apportionment, kind: int, size: int, mode: str) -> int:
    """Return the number of batches that one type suffices for, with or without its rest."""
    if mode.startswith("first"):
        whole = _batches_until(shares, kind, size + 1) - 1  # the last that repeats none
        has_rest = shares.before(whole)[kind] < size
        return whole + (has_rest and mode.endswith("fill"))
    until_seen = _batches_until(shares, kind, size)
    is_filled_up = shares.before(until_seen)[kind] > size
    return until_seen - (is_filled_up and mode.endswith("drop"))


def _batches_until(shares: Apportionment, kind: int, num_rows: int) -> int:
    """Return the fewest batches that take `num_rows` rows of a type."""
    most = 1
    while shares.before(most)[kind] < num_rows:
        most *= 2
    return bisect.bisect_left(
        range(most + 1), num_rows, key=lambda batches: shares.before(batches)[kind]
    )


class Mixture:
    """The batches of all epochs.

    Rows are numbered through all types: those of type t are `starts[t]` .. `starts[t + 1] - 1`. A
    batch has its rows in the order of their types, so each of n replicas, which takes every n-th
    row, gets the same number of each type, but for one at most.

    Args:
        sizes: rows of each type.
        counts: rows of each type in every batch; they add up to `batch`.
        weights: in what proportion the types are drawn. Without both: in proportion to sizes.
        batch: rows of a global batch, of all replicas; accumulation takes several of them.
        drop_mode: when an epoch ends, as a name or a number.
        shuffle: else each type comes in its own order, in every epoch.

    Raises:
        UserError: proportions that do not fit the types or the batch, or an epoch without a batch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        counts: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        batch: int,
        drop_mode: str | int = "first_ends_drop",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.sizes = [int(size) for size in sizes]
        self.batch_rows = batch
        self.drop_mode = as_drop_mode(drop_mode)
        self.seed = seed
        self.shuffle = shuffle
        self.starts = [0, *itertools.accumulate(self.sizes)]
        self.shares = _shares(self.sizes, counts, weights, batch)
        ends = [
            _type_batches(self.shares, kind, size, self.drop_mode)
            for kind, size in enumerate(self.sizes)
            if self.shares.has_share(kind)
        ]
        self._num_batches = min(ends) if self.drop_mode.startswith("first") else max(ends)
        if self._num_batches == 0:
            lines = ", ".join(
                f"type {kind}: {size} rows, {float(self.shares.share(kind)):.4g} in a batch"
                for kind, size in enumerate(self.sizes)
                if size < self.shares.share(kind)
            )
            raise UserError(
                f"an epoch of the corpus has no whole batch of {batch} rows "
                f"({lines or f'{sum(self.sizes)} rows in all'}). Take smaller batches, another "
                "share, or the drop mode first_ends_fill or last_ends_fill."
            )

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self._num_batches

    def batch(self, epoch: int, index: int) -> numpy.ndarray:
        """Return the rows of one batch, int64, in the order of their types."""
        return self.rows(epoch, index, index + 1)

    def rows(self, epoch: int, first_batch: int, end_batch: int) -> numpy.ndarray:
        """Return int64 rows of neighbouring batches of an epoch, in the order of their types."""
        assert 0 <= first_batch < end_batch <= len(self)
        begins, ends = self.shares.before(first_batch), self.shares.before(end_batch)
        stretches = []  # (type, seed, places of that order)
        for kind, (first, last) in enumerate(zip(begins, ends, strict=True)):
            size = self.sizes[kind]
            while first < last:
                turn, place = divmod(first, size)  # which order of the epoch, and where in it
                until = min(size, place + last - first)
                seed = derive_seed(self.seed, "corpus", kind, epoch, turn) if self.shuffle else 0
                stretches.append((kind, seed, place, until))
                first += until - place
        lengths = [until - place for _, _, place, until in stretches]
        kinds = numpy.repeat([kind for kind, *_ in stretches], lengths)
        places = numpy.concatenate([numpy.arange(*span) for _, _, *span in stretches])
        if self.shuffle:
            seeds = numpy.repeat([seed for _, seed, *_ in stretches], lengths)
            places = permute(places, numpy.array(self.sizes)[kinds], seeds)
        return places + numpy.array(self.starts)[kinds]

    def drawn(self) -> list[int]:
        """Return the rows of each type in an epoch, repeated ones counted each time."""
        return self.shares.before(len(self))


def _shares(
    sizes: Sequence[int],
    counts: Sequence[int] | None,
    weights: Sequence[float] | None,
    batch: int,
) -> Apportionment:
    assert counts is None or weights is None
    given = counts if counts is not None else weights
    if given is None:
        if sum(sizes) == 0:
            raise UserError("the corpus has no rows. Build it again.")
        # in proportion to sizes, types end together, in the batch that takes the last row
        return Apportionment([0] * len(sizes), sizes, batch)
    listed = ",".join(f"{number:g}" for number in given)
    if len(given) != len(sizes) or min(given) < 0 or not any(given):
        rows = ",".join(map(str, sizes))
        raise UserError(
            f"the shares {listed} were given for {len(sizes)} types with {rows} rows. Give one "
            "number a type, none negative and not all 0; `corpus.py stats` lists the types."
        )
    if counts is None:
        shares = Apportionment.of_weights([float(weight) for weight in given], batch)
    elif sum(counts) == batch:
        shares = Apportionment([int(count) for count in counts], [0] * len(counts), batch)
    else:
        raise UserError(
            f"the counts {listed} of a batch's types add up to {sum(counts)}, and a global batch "
            f"(batch size x replicas) has {batch} rows. Change the counts or the batch size."
        )
    for kind, size in enumerate(sizes):
        if size == 0 and shares.has_share(kind):
            raise UserError(f"type {kind} of the corpus has no rows. Give it a share of 0.")
    return shares
