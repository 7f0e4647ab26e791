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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy

from stageline.data.rows.bad_rows import current_bad_rows, leaving_out
from stageline.data.rows.one_set import RowMaker, SetInfo
from stageline.data.rows.read_json import RowFileReader
from stageline.data.rows.tables import stream_library, text_rows
from stageline.errors import DataError, UserError
from stageline.seeds import derive_seed

Mix = Literal["concat", "interleave_under", "interleave_over"]
Item = TypeVar("Item")
NO_END = 1 << 40  # what a stream says its length is
KEPT = 4096  # rows that were read last, at least: a step asks for its rows in any order
_DRAWN_AT_ONCE = 1000  # as the library does, so that draws are the same
_HEAD = 1 << 16  # bytes at both ends of a file that its fingerprint is made of
_VERSION = 1


def check_mix(mix: Mix, num_sets: int, probabilities: Sequence[float] | None) -> None:
    """Refuses probabilities that do not belong to the sets."""
    if probabilities is None:
        return
    total, problem = sum(probabilities), ""
    if mix == "concat":
        problem = (
            " came with `dataset.mix` concat, which takes all rows of each set. "
            "interleave_under or interleave_over was expected, because these draw sets: choose "
            "one, or leave the probabilities out"
        )
    elif num_sets == 1:
        problem = (
            " came with one set. Two or more were expected, because they say from which set the "
            "next row comes: leave them out"
        )
    elif len(probabilities) != num_sets:
        problem = (
            f": {len(probabilities)} came for {num_sets} sets. One for each set was expected, in "
            "the order of their names"
        )
    elif not all(0 <= value <= 1 for value in probabilities) or abs(total - 1) > 0.02:
        problem = (
            ": values between 0 and 1 that add up to 1 were expected, because each is the chance "
            f"of a set; they add up to {total:g}: correct them"
        )
    elif mix == "interleave_over" and not all(probabilities):
        problem = (
            " with `dataset.mix` interleave_over: a set with chance 0 would never come to its "
            "end, and drawing stops when all have: leave that set out"
        )
    if problem:
        given = ",".join(f"{value:g}" for value in probabilities)
        raise UserError(f"`dataset.probabilities` {given}{problem}.")


def repeating(make_rows: Callable[[], Iterator[Item]], name: str) -> Iterator[tuple[Item, bool]]:
    """The rows of a set, again from the beginning after the last, and whether each is the last."""
    while True:
        rows = make_rows()
        row = next(rows, None)
        if row is None:
            raise DataError(f"the data set {name!r} has no good row. At least one was expected.")
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
    """Rows of several sets, as `datasets.interleave_datasets` takes them for the same seed.

    Args:
        sets: what `repeating` gives.
        over: go on until each set came to its end at least once; else until one has.
        probabilities: of the sets; None: they take turns, and a round is finished.
    """
    num_sets = len(sets)
    is_done = [False] * num_sets
    stops = all if over else any
    turns = itertools.cycle(range(num_sets))
    for place, chosen in enumerate(turns if probabilities is None else _draws(probabilities, seed)):
        ends_here = probabilities is not None or place % num_sets == 0
        if ends_here and stops(is_done):
            return
        row, is_last = next(sets[chosen])
        yield row
        is_done[chosen] |= is_last


def _draws(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    generator = numpy.random.default_rng(seed)
    chances = numpy.array(probabilities) / sum(probabilities)
    while True:
        yield from generator.choice(len(chances), size=_DRAWN_AT_ONCE, p=chances).tolist()


def mixed(
    lengths: Sequence[int], mix: Mix, probabilities: Sequence[float] | None, *, seed: int
) -> numpy.ndarray:
    """Rows in the order of the mix; those of the second set are numbered after the first's."""
    starts = numpy.cumsum([0, *lengths]).tolist()
    if mix == "concat" or len(lengths) == 1:
        return numpy.arange(starts[-1], dtype=numpy.int64)
    numbers = [range(first, stop) for first, stop in itertools.pairwise(starts)]
    sets = [repeating(own.__iter__, str(place)) for place, own in enumerate(numbers)]
    over = mix == "interleave_over"
    order = interleave(sets, over=over, probabilities=probabilities, seed=seed)
    return numpy.fromiter(order, dtype=numpy.int64)


def exactly(num_rows: int, num_samples: int, *, seed: int, name: str) -> numpy.ndarray:
    """`num_samples` of the rows: each once in a drawn order, then more of them by lot."""
    generator = numpy.random.default_rng(derive_seed(seed, "num_samples", name))
    chosen = generator.permutation(num_rows)[:num_samples]
    more = generator.integers(num_rows, size=max(num_samples - num_rows, 0))
    return numpy.concatenate([chosen, more]).astype(numpy.int64)


def held_out(order: numpy.ndarray, val_size: int | float, *, seed: int) -> numpy.ndarray:
    """The rows of `order`, each once, that are kept for evaluation.

    Args:
        val_size: their number, or below 1 their share, at least one.
    """
    rows = numpy.unique(order)
    is_share = isinstance(val_size, float)
    if (is_share and not 0 < val_size < 1) or (not is_share and val_size < 1):
        raise UserError(
            f"`dataset.val_size` {val_size}: a number of rows (1, 2, ...) or a share between 0 and "
            "1 was expected, because so many rows are held out: correct it, or leave it out."
        )
    count = max(1, round(val_size * len(rows))) if is_share else int(val_size)
    if count >= len(rows):
        raise UserError(
            f"`dataset.val_size` {val_size} holds out {count} of {len(rows)} different rows. At "
            "least one was expected to be left to train: choose a smaller one."
        )
    generator = numpy.random.default_rng(derive_seed(seed, "val_size"))
    return numpy.sort(generator.permutation(rows)[:count])


@dataclass(frozen=True)
class StreamRow:
    """A row that was read and not yet converted."""

    maker: RowMaker
    data: dict[str, Any]
    source: str
    number: int  # in its set

    def make(self) -> tuple[list[Any] | None, dict[str, Any]]:
        """Its images and sample."""
        return self.maker.make(self.data, self.source, number=self.number)


class StreamDataset:
    """The rows of some sets by their position in an endless stream.

    Reading on is cheap, going back further than the rows that are kept starts from the beginning.

    Args:
        media: where images are, and how many of a video are taken, as `RowMaker` has it.
        buffer_size: rows that are shuffled together.
        val_size: the first so many rows are for evaluation, and kept in `held`.
    """

    is_stream = True

    def __init__(
        self,
        infos: Sequence[SetInfo],
        *,
        media: dict[str, Any],
        mix: Mix,
        probabilities: Sequence[float] | None,
        buffer_size: int,
        val_size: int | float | None,
        seed: int,
    ) -> None:
        num_held = 0 if val_size is None else val_size
        if buffer_size < 1:
            raise UserError(
                f"`dataset.buffer_size` {buffer_size}: at least 1 was expected, because so many "
                "rows are shuffled together; 1 keeps the order of the files."
            )
        if not isinstance(num_held, int) or num_held < 0:
            raise UserError(
                f"`dataset.val_size` {num_held} came with `dataset.streaming`. A number of rows "
                "was expected, because a stream's first rows are held out, and nobody knows how "
                "many it has: give one."
            )
        self._facts = [_VERSION, mix, probabilities, buffer_size, num_held, seed]
        self._mix, self._probabilities = mix, probabilities
        self._buffer_size, self._seed = buffer_size, seed
        self._makers = [RowMaker(info, **media) for info in infos]
        for maker in self._makers:
            if maker.files.kind in ("json", "hub"):
                raise UserError(
                    f"{maker.info.option} {maker.info.place} came with `dataset.streaming`. JSON "
                    "lines, CSV, text, Parquet or Arrow files were expected, because a JSON list "
                    "is read as a whole and a set of the hub is not streamed: write one object a "
                    "line (.jsonl), or leave streaming out."
                )
        self._names = ", ".join(maker.info.name for maker in self._makers)
        self._bad_rows = current_bad_rows()
        self.held = self._first(int(num_held))
        self._held_sources = {row.source for row in self.held}
        self._start()

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, position: int) -> tuple[list[Any] | None, dict[str, Any]]:
        return self._row(position).make()

    def describe(self, position: int) -> str:
        return self._row(position).source

    def fingerprint(self) -> str:
        """Tells whether another stream has the same rows; of files it reads both ends only."""
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
            left = (row for row in self._mixed() if row.source not in self._held_sources)
            num_rows = 0
            for row in _shuffled(left, self._buffer_size, generator):
                num_rows += 1
                yield row
            if num_rows == 0:
                raise DataError(
                    f"the stream of {self._names} has no row to train on"
                    f"{' behind the held-out ones' if self.held else ''}. At least one was "
                    f"expected: check the files.\n{self._bad_rows.listed(5)}".rstrip()
                )

    def _mixed(self) -> Iterator[StreamRow]:
        """One epoch in the order of the files, the held-out rows too."""
        readers = [functools.partial(self._read, maker) for maker in self._makers]
        if self._mix == "concat" or len(readers) == 1:
            return itertools.chain.from_iterable(read() for read in readers)
        names = [maker.info.name for maker in self._makers]
        return interleave(
            [repeating(read, name) for read, name in zip(readers, names, strict=True)],
            over=self._mix == "interleave_over",
            probabilities=self._probabilities,
            seed=derive_seed(self._seed, "mix") % 2**32,
        )

    def _first(self, count: int) -> list[StreamRow]:
        if count == 0:
            return []
        found: dict[str, StreamRow] = {}  # where sets wrap around, a row comes twice
        with leaving_out(self._bad_rows):
            for row in self._mixed():
                found.setdefault(row.source, row)
                if len(found) == count:
                    return list(found.values())
        raise UserError(
            f"`dataset.val_size` {count}: the stream of {self._names} has {len(found)} rows. "
            "More were expected, because its first ones are held out: choose a smaller number."
        )

    def _read(self, maker: RowMaker) -> Iterator[StreamRow]:
        """The good rows of a set, in the order of its files; bad ones go to `current_bad_rows`."""
        number = 0
        for path in maker.files.paths:
            for data, source in _read_file(path, maker.files.kind):
                # else a row would have a position before it is known to be bad
                if not self._bad_rows.limit or maker.is_good(data, source):
                    yield StreamRow(maker, data, source, number)
                    number += 1


class FirstRows:
    """The held-out rows of a stream, which are few and lie in memory."""

    def __init__(self, stream: StreamDataset) -> None:
        self._rows = stream.held
        self._fingerprint = stream.fingerprint()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        return self._rows[index].make()

    def describe(self, index: int) -> str:
        return self._rows[index].source

    def fingerprint(self) -> str:
        return self._fingerprint


def _read_file(path: Path, kind: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if kind in ("parquet", "arrow"):
        yield from stream_library(path, kind)
        return
    reader = RowFileReader(path)
    for data, source, _ in text_rows(reader, kind):
        yield data, source
    reader.done()  # refuses a file that grew meanwhile


def _shuffled(
    rows: Iterator[StreamRow], size: int, generator: numpy.random.Generator
) -> Iterator[StreamRow]:
    """Each row leaves the buffer at random, when one more comes or none is left."""
    buffer: list[StreamRow] = []
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
