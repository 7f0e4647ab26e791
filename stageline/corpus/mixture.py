"""Which rows are in which batch: types in fixed proportions, each type in an order of its own.

Any batch of any epoch is computed from the seed alone, in time and memory of one batch. The
sequence depends on sizes, proportions, batch, seed and drop mode; not on how many replicas share a
batch, how many batches make a step, how many processes load, or how long the run is.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from stageline.corpus.apportion import Apportionment
from stageline.corpus.drop_modes import DropMode, as_drop_mode, num_batches
from stageline.corpus.order import permute
from stageline.errors import UserError
from stageline.seeds import derive_seed


@dataclass(frozen=True)
class TypeShare:
    """What one epoch takes of a type.

    Attributes:
        size: its rows.
        per_batch: of these in a batch, on the average.
        drawn: rows in the epoch, repeated ones counted each time.
        distinct: of these, different rows.
        repeated: `drawn - distinct`.
        dropped: rows that the epoch leaves out.
        most: how often the row comes that comes most often.
    """

    size: int
    per_batch: float
    drawn: int
    distinct: int
    repeated: int
    dropped: int
    most: int


class Mixture:
    """The batches of all epochs.

    Rows are numbered through all types: those of type t are `starts[t]` .. `starts[t + 1] - 1`. A
    batch has its rows in the order of their types. So the replicas r::n of n that share it have of
    each type the same number, but for one at most.

    Args:
        sizes: rows of each type.
        counts: rows of each type in every batch; they add up to `batch`.
        weights: in what proportion the types are drawn; neither of the two: as their sizes.
        batch: rows of a global batch, of all replicas; accumulation takes several of them.
        drop_mode: when an epoch ends; a name or a number of stageline/corpus/drop_modes.py.
        seed: of all orders.
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
        drop_mode: DropMode | str | int = "first_ends_drop",
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
        self._check_sizes()
        self._num_batches = num_batches(self.sizes, self.shares, self.drop_mode)
        if self._num_batches == 0:
            raise UserError(self._too_small())

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._num_batches

    def batch(self, epoch: int, index: int) -> numpy.ndarray:
        """The rows of one batch, int64 [rows of a batch], in the order of their types."""
        return self.rows(epoch, index, index + 1)

    def rows(self, epoch: int, first_batch: int, end_batch: int) -> numpy.ndarray:
        """The rows of neighbouring batches of an epoch, int64, in the order of their types."""
        assert 0 <= first_batch < end_batch <= len(self)
        begins, ends = self.shares.before(first_batch), self.shares.before(end_batch)
        stretches = [
            stretch
            for kind, (first, last) in enumerate(zip(begins, ends, strict=True))
            for stretch in self._stretches(kind, epoch, first, last)
        ]
        lengths = [last - first for _, _, first, last in stretches]
        kinds = numpy.repeat([kind for kind, *_ in stretches], lengths)
        places = numpy.concatenate([numpy.arange(*ends) for _, _, *ends in stretches])
        if self.shuffle:
            seeds = numpy.repeat([seed for _, seed, *_ in stretches], lengths)
            places = permute(places, numpy.array(self.sizes)[kinds], seeds)
        return places + numpy.array(self.starts)[kinds]

    @property
    def per_epoch(self) -> list[TypeShare]:
        """What an epoch takes of each type."""
        drawn = self.shares.before(len(self))
        return [
            TypeShare(
                size=size,
                per_batch=float(self.shares.share(kind)),
                drawn=rows,
                distinct=min(size, rows),
                repeated=max(0, rows - size),
                dropped=max(0, size - rows),
                most=-(-rows // size) if size else 0,
            )
            for kind, (size, rows) in enumerate(zip(self.sizes, drawn, strict=True))
        ]

    def _stretches(
        self, kind: int, epoch: int, first: int, last: int
    ) -> list[tuple[int, int, int, int]]:
        """Rows first .. last-1 that a type gives in an epoch: type, seed, places of that order."""
        made, size = [], self.sizes[kind]
        while first < last:
            turn, place = divmod(first, size)  # which order of the epoch, and where in it
            until = min(size, place + last - first)
            seed = derive_seed(self.seed, "corpus", kind, epoch, turn) if self.shuffle else 0
            made.append((kind, seed, place, until))
            first += until - place
        return made

    def _check_sizes(self) -> None:
        for kind, size in enumerate(self.sizes):
            if size == 0 and self.shares.has_share(kind):
                raise UserError(
                    f"type {kind} of the corpus has no rows, and "
                    f"{float(self.shares.share(kind)):g} of it were asked for in each batch. Rows "
                    "of every type with a share were expected: give it a share of 0."
                )

    def _too_small(self) -> str:
        lines = ", ".join(
            f"type {kind}: {size} rows, {float(self.shares.share(kind)):.4g} in a batch"
            for kind, size in enumerate(self.sizes)
            if size < self.shares.share(kind)
        )
        lines = lines or f"{sum(self.sizes)} rows in all"
        return (
            f"an epoch of the corpus has no whole batch of {self.batch_rows} rows ({lines}), "
            f"and drop mode {self.drop_mode} leaves out what is less than a batch takes. At least "
            "one batch was expected: take smaller batches or another share, or drop mode "
            "first_ends_fill or last_ends_fill, which repeat rows."
        )


def _shares(
    sizes: Sequence[int],
    counts: Sequence[int] | None,
    weights: Sequence[float] | None,
    batch: int,
) -> Apportionment:
    if counts is not None and weights is not None:
        raise UserError(
            "counts and weights of a batch's types were both given. One of them was expected, "
            "because each decides the proportions: leave one out."
        )
    given = counts if counts is not None else weights
    if given is None:
        if sum(sizes) == 0:
            raise UserError("the corpus has no rows. At least one was expected: build it again.")
        return Apportionment.of_sizes(sizes, batch)
    if len(given) != len(sizes) or min(given) < 0 or not any(given):
        raise UserError(
            f"the shares {_listed(given)} were given for {len(sizes)} types with {_listed(sizes)} "
            "rows. One number a type was expected, none negative and not all 0: `corpus.py "
            "stats` lists the types in their order."
        )
    if counts is None:
        return Apportionment.of_weights([float(weight) for weight in given], batch)
    if sum(counts) != batch:
        raise UserError(
            f"the counts {_listed(counts)} of a batch's types add up to {sum(counts)}, and a "
            f"global batch has {batch} rows (batch size x data parallel replicas, without "
            "accumulation). The same number was expected: change the counts or the batch size."
        )
    return Apportionment.of_counts([int(count) for count in counts])


def _listed(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
