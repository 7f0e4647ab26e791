"""Data sets that are read as training goes: no index of their rows, never all in memory.

A row has a position in one endless stream, epoch after epoch, which follows from the files, the
options and the seed alone. So any process that reads forward to a position finds the same row
there: replicas take other positions, and a resumed run reads forward to where it goes on.

Here is also which rows of several sets are taken, and in which order, with streams and without.
All draws follow from a seed, so every rank comes to the same rows without talking.
"""

import collections
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy

from stageline.data.rows.bad_rows import current_bad_rows, leaving_out
from stageline.data.rows.one_set import RowMaker
from stageline.data.rows.read_rows import Row, stream_rows
from stageline.errors import DataError, UserError
from stageline.seeds import derive_seed

Mix = Literal["concat", "interleave_under", "interleave_over"]
Item = TypeVar("Item")
StreamRow = tuple[RowMaker, Row]  # a row that was read and not yet converted
NO_END = 1 << 40  # what a stream says its length is
KEPT = 4096  # rows that were read last, at least: a step asks for its rows in any order
_HEAD = 1 << 16  # bytes at both ends of a file that its fingerprint is made of
_VERSION = 1


def check_mix(mix: Mix, num_sets: int, probabilities: Sequence[float] | None) -> None:
    """Refuse probabilities that do not belong to the sets."""
    if probabilities is None:
        return
    total, problem = sum(probabilities), ""
    if mix == "concat":
        problem = "`dataset.mix` concat takes all rows of each set: choose another, or drop them"
    elif len(probabilities) != num_sets or num_sets == 1:
        problem = f"{num_sets} sets are mixed: give one for each of several, or drop them"
    elif not all(0 <= value <= 1 for value in probabilities) or abs(total - 1) > 0.02:
        problem = f"they add up to {total:g}: give values between 0 and 1 that add up to 1"
    elif mix == "interleave_over" and not all(probabilities):
        problem = "a set with chance 0 would never come to its end: leave that set out"
    if problem:
        given = ",".join(f"{value:g}" for value in probabilities)
        raise UserError(f"`dataset.probabilities` {given}: {problem}.")


def repeating(make_rows: Callable[[], Iterator[Item]], name: str) -> Iterator[tuple[Item, bool]]:
    """Yield the rows of a set, over and over, and whether each is the last one."""
    while True:
        rows = make_rows()
        row = next(rows, None)
        if row is None:
            raise DataError(f"the data set {name!r} has no good row. Check its files.")
        while row is not None:
            following = next(rows, None)
            yield row, following is None
            row = following


def interleave(
    sets: Sequence[Iterator[tuple[Item, bool]]],
    *,
    over: bool,
    probabilities: Sequence[float] | None,
    seed: int,
) -> Iterator[Item]:
    """Yield rows of several sets, as `datasets.interleave_datasets` takes them for the same seed.

    The library's own cannot stop at a position and be read on by a forked worker.

    Args:
        sets: what `repeating` gives.
        over: continue until each set came to its end at least once; else until one has.
        probabilities: of the sets; None: they take turns, and a round is finished.
    """
    num_sets = len(sets)
    is_done = [False] * num_sets
    stops = all if over else any

    def draws(probabilities: Sequence[float]) -> Iterator[int]:
        generator = numpy.random.default_rng(seed)
        chances = numpy.array(probabilities) / sum(probabilities)
        while True:  # a thousand at once as the library does, so that draws are the same
            yield from generator.choice(num_sets, size=1000, p=chances).tolist()

    turns = itertools.cycle(range(num_sets)) if probabilities is None else draws(probabilities)
    for place, chosen in enumerate(turns):
        if (probabilities is not None or place % num_sets == 0) and stops(is_done):
            return
        row, is_last = next(sets[chosen])
        yield row
        is_done[chosen] |= is_last


def mixed(
    lengths: Sequence[int], mix: Mix, probabilities: Sequence[float] | None, *, seed: int
) -> numpy.ndarray:
    """Return rows in the order of the mix, numbered over the sets."""
    starts = numpy.cumsum([0, *lengths]).tolist()
    if mix == "concat" or len(lengths) == 1:
        return numpy.arange(starts[-1], dtype=numpy.int64)
    numbers = [range(first, stop) for first, stop in itertools.pairwise(starts)]
    sets = [repeating(own.__iter__, str(place)) for place, own in enumerate(numbers)]
    over = mix == "interleave_over"
    order = interleave(sets, over=over, probabilities=probabilities, seed=seed)
    return numpy.fromiter(order, dtype=numpy.int64)


def exactly(num_rows: int, num_samples: int, *, seed: int, name: str) -> numpy.ndarray:
    """Return `num_samples` of the rows: each once in a drawn order, then more of them by lot."""
    generator = numpy.random.default_rng(derive_seed(seed, "num_samples", name))
    chosen = generator.permutation(num_rows)[:num_samples]
    more = generator.integers(num_rows, size=max(num_samples - num_rows, 0))
    return numpy.concatenate([chosen, more]).astype(numpy.int64)


def held_out(order: numpy.ndarray, val_size: int | float, *, seed: int) -> numpy.ndarray:
    """Return the rows of `order`, each once, that are kept for evaluation.

    Args:
        val_size: their number, or below 1 their share, at least one.
    """
    rows = numpy.unique(order)
    is_share = isinstance(val_size, float)
    if (is_share and not 0 < val_size < 1) or (not is_share and val_size < 1):
        raise UserError(
            f"`dataset.val_size` {val_size}: give a number of rows (1, 2, ...), or a share between "
            "0 and 1."
        )
    count = max(1, round(val_size * len(rows))) if is_share else int(val_size)
    if count >= len(rows):
        raise UserError(
            f"`dataset.val_size` {val_size} holds out {count} of {len(rows)} different rows, so "
            "none is left to train on. Choose a smaller one."
        )
    generator = numpy.random.default_rng(derive_seed(seed, "val_size"))
    return numpy.sort(generator.permutation(rows)[:count])


class StreamDataset:
    """The rows of some sets by their position in an endless stream.

    Reading on is cheap; going back further than the rows that are kept starts from the beginning.

    Args:
        makers: convert the rows of the sets.
        buffer_size: rows that are shuffled together.
        val_size: the first so many rows are for evaluation, and kept in `held`.
    """

    is_stream = True

    def __init__(
        self,
        makers: Sequence[RowMaker],
        *,
        mix: Mix,
        probabilities: Sequence[float] | None,
        buffer_size: int,
        val_size: int | float | None,
        seed: int,
    ) -> None:
        num_held = 0 if val_size is None else val_size
        if buffer_size < 1:
            raise UserError(f"`dataset.buffer_size` {buffer_size}: at least 1 row is needed.")
        if not isinstance(num_held, int) or num_held < 0:
            raise UserError(
                f"`dataset.val_size` {num_held} came with `dataset.streaming`. Give a number of "
                "rows: a stream's first rows are held out."
            )
        for maker in makers:
            if maker.files.kind in ("json", "hub"):
                raise UserError(
                    f"{maker.info.option} {maker.info.place} came with `dataset.streaming`. A JSON "
                    "list is read as a whole, and a set of the hub is not streamed: write one "
                    "object a line (.jsonl), or leave streaming out."
                )
        self._facts = [_VERSION, mix, probabilities, buffer_size, num_held, seed]
        self._makers = list(makers)
        self._mix, self._probabilities = mix, probabilities
        self._buffer_size, self._seed = buffer_size, seed
        self._names = ", ".join(maker.info.name for maker in makers)
        self._bad_rows = current_bad_rows()
        self.held = self._first(num_held)
        self._held_sources = {row.source for _, row in self.held}
        self._start()

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, position: int) -> tuple[list[Any] | None, dict[str, Any]]:
        maker, row = self._row(position)
        return maker.make(row)

    def describe(self, position: int) -> str:
        """Return file and line of a row."""
        return self._row(position)[1].source

    def fingerprint(self) -> str:
        """Return what tells whether another stream has the same rows, by both ends of its files."""
        facts: list[Any] = [*self._facts]
        for maker in self._makers:
            facts += [maker.settings(), *map(_file_facts, maker.files.paths)]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _row(self, position: int) -> StreamRow:
        if position < 0:
            raise IndexError(position)
        kept = self._kept
        # a forked worker shares the place in an open file with its siblings
        if self._process != os.getpid() or (kept and position < self._next - len(kept)):
            self._start()
        with leaving_out(self._bad_rows):
            while self._next <= position:
                self._kept.append(next(self._rows))
                self._next += 1
        return self._kept[position - self._next]

    def _start(self) -> None:
        self._process = os.getpid()
        self._next = 0  # position of the row that is read next
        self._rows = self._endless()
        self._kept: collections.deque[StreamRow] = collections.deque(
            maxlen=max(KEPT, self._buffer_size)
        )

    def _endless(self) -> Iterator[StreamRow]:
        for epoch in itertools.count():
            generator = numpy.random.default_rng(derive_seed(self._seed, "stream", epoch))
            left = (item for item in self._mixed() if item[1].source not in self._held_sources)
            num_rows = 0
            for item in _shuffled(left, self._buffer_size, generator):
                num_rows += 1
                yield item
            if num_rows == 0:
                raise DataError(
                    f"the stream of {self._names} has no row to train on"
                    f"{' behind the held-out ones' if self.held else ''}. Check the files.\n"
                    f"{self._bad_rows.listed(5)}".rstrip()
                )

    def _mixed(self) -> Iterator[StreamRow]:
        """Yield one epoch in the order of the files, the held-out rows too."""
        if self._mix == "concat" or len(self._makers) == 1:
            return itertools.chain.from_iterable(map(self._read, self._makers))
        sets = [
            repeating(functools.partial(self._read, maker), maker.info.name)
            for maker in self._makers
        ]
        return interleave(
            sets,
            over=self._mix == "interleave_over",
            probabilities=self._probabilities,
            seed=derive_seed(self._seed, "mix") % 2**32,
        )

    def _first(self, count: int) -> list[StreamRow]:
        found: dict[str, StreamRow] = {}  # where sets wrap around, a row comes twice
        rows = self._mixed() if count else iter(())
        with leaving_out(self._bad_rows):
            while len(found) < count and (item := next(rows, None)) is not None:
                found.setdefault(item[1].source, item)
        if len(found) < count:
            raise UserError(
                f"`dataset.val_size` {count}: the stream of {self._names} has {len(found)} rows. "
                "Choose a smaller number."
            )
        return list(found.values())

    def _read(self, maker: RowMaker) -> Iterator[StreamRow]:
        """Yield the good rows of a set, in the order of its files."""
        number = 0
        for path in maker.files.paths:
            for row in stream_rows(path, maker.files.kind, take=self._bad_rows.take):
                # else a row would have a position before it is known to be bad
                if not self._bad_rows.limit or maker.is_good(row):
                    yield maker, replace(row, number=number)
                    number += 1


class FirstRows:
    """The held-out rows of a stream, which are few and kept in memory."""

    def __init__(self, stream: StreamDataset) -> None:
        self._rows = stream.held
        self.fingerprint = stream.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        maker, row = self._rows[index]
        return maker.make(row)

    def describe(self, index: int) -> str:
        """Return file and line of a row."""
        return self._rows[index][1].source


def _shuffled(rows: Iterator[Item], size: int, generator: numpy.random.Generator) -> Iterator[Item]:
    """Yield the rows; each leaves a buffer at random, when one more comes or none is left."""
    buffer: list[Item] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = int(generator.integers(size))
        yield buffer[place]
        buffer[place] = row
    if size > 1:
        generator.shuffle(buffer)
    yield from buffer


def _file_facts(path: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD))
        file.seek(max(size - _HEAD, 0))
        digest.update(file.read(_HEAD))
    return path.name, size, digest.hexdigest()
