"""Data sets that are read as training goes: no index of their rows, never all in memory.

A row has a position in one endless stream, epoch after epoch, which follows from the files, the
options and the seed alone. So any process that reads forward to a position finds the same row
there: replicas take other positions, and a resumed run reads forward to where it goes on.
"""

import collections
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.data.rows.bad_rows import current_bad_rows, leaving_out
from stageline.data.rows.one_set import RowMaker
from stageline.data.rows.row_files import RowFileReader
from stageline.data.rows.set_register import SetInfo
from stageline.data.rows.tables import find_files, stream_library, text_rows
from stageline.errors import DataError, UserError
from stageline.seeds import derive_seed

# -- which rows of several sets are taken, and in which order. Integers ---------------------------
# Knows neither files nor rows.
#
# All draws follow from a seed, so every rank comes to the same rows without talking. Mixing gives
# what `datasets.interleave_datasets` gives for the same seed.

Mix = Literal["concat", "interleave_under", "interleave_over"]
_DRAWN_AT_ONCE = 1000  # as the library does, so that draws are the same


def check_mix(mix: Mix, num_sets: int, probabilities: Sequence[float] | None) -> None:
    """Refuses probabilities that do not belong to the sets.

    Raises:
        UserError: says what they should be.
    """
    if probabilities is None:
        return
    given = f"`dataset.probabilities` {','.join(f'{value:g}' for value in probabilities)}"
    if mix == "concat":
        raise UserError(
            f"{given} came with `dataset.mix` concat, which takes all rows of each set. "
            "interleave_under or interleave_over was expected, because these draw sets: choose "
            "one, or leave the probabilities out."
        )
    if num_sets == 1:
        raise UserError(
            f"{given} came with one set. Two or more were expected, because they say from which "
            "set the next row comes: leave them out."
        )
    if len(probabilities) != num_sets:
        raise UserError(
            f"{given}: {len(probabilities)} came for {num_sets} sets. One for each set was "
            "expected, in the order of their names."
        )
    if not all(0 <= value <= 1 for value in probabilities) or abs(sum(probabilities) - 1) > 0.02:
        raise UserError(
            f"{given}: values between 0 and 1 that add up to 1 were expected, because each is the "
            f"chance of a set; they add up to {sum(probabilities):g}."
        )
    if mix == "interleave_over" and not all(probabilities):
        raise UserError(
            f"{given} with `dataset.mix` interleave_over: a set with chance 0 would never come to "
            "its end, and drawing stops when all have: leave that set out."
        )


def interleave(
    advance: Sequence[Callable[[], bool]],
    *,
    over: bool,
    probabilities: Sequence[float] | None,
    seed: int,
) -> Iterator[int]:
    """Numbers of the sets that rows are taken from, one after the other, until mixing stops.

    Args:
        advance: of each set; is told of each row that is taken, and says whether it was the last.
        over: go on until each set came to its end at least once; else until one has.
    """
    num_sets = len(advance)
    is_done = [False] * num_sets
    stops = all if over else any
    # without probabilities sets take turns, and a round is finished
    turns = _turns(num_sets) if probabilities is None else _draws(probabilities, seed)
    for place, chosen in enumerate(turns):
        ends_here = probabilities is not None or place % num_sets == 0
        if ends_here and stops(is_done):
            return
        yield chosen
        is_done[chosen] |= advance[chosen]()


def mixed(
    lengths: Sequence[int], mix: Mix, probabilities: Sequence[float] | None, *, seed: int
) -> numpy.ndarray:
    """Rows in the order of the mix; those of the second set are numbered after the first's."""
    if mix == "concat" or len(lengths) == 1:
        return numpy.arange(sum(lengths), dtype=numpy.int64)
    starts = numpy.cumsum([0, *lengths])
    if probabilities is None:
        count = (min if mix == "interleave_under" else max)(lengths)
        rounds = numpy.arange(count, dtype=numpy.int64)
        return numpy.stack(
            [start + rounds % size for start, size in zip(starts, lengths, strict=False)], axis=1
        ).reshape(-1)
    counters = [_Counter(size) for size in lengths]
    order = [
        int(starts[chosen]) + counters[chosen].place
        for chosen in interleave(
            [counter.advance for counter in counters],
            over=mix == "interleave_over",
            probabilities=probabilities,
            seed=seed,
        )
    ]
    return numpy.array(order, dtype=numpy.int64)


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

    Raises:
        UserError: nothing would be left to train, or the size is neither.
    """
    rows = numpy.unique(order)
    is_share = isinstance(val_size, float)
    if (is_share and not 0 < val_size < 1) or (not is_share and val_size < 1):
        raise UserError(
            f"`dataset.val_size` {val_size}: a number of rows (1, 2, ...) or a share between 0 and "
            "1 was expected, because so many rows are held out: correct it, or leave it out."
        )
    count = max(1, round(val_size * len(rows))) if is_share else val_size
    if count >= len(rows):
        raise UserError(
            f"`dataset.val_size` {val_size} holds out {count} of {len(rows)} different rows. At "
            "least one was expected to be left to train: choose a smaller one."
        )
    generator = numpy.random.default_rng(derive_seed(seed, "val_size"))
    return numpy.sort(generator.permutation(rows)[:count])


class _Counter:
    """The next row of a set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = 0

    def advance(self) -> bool:
        self.place += 1
        is_last = self.place == self.size
        self.place %= self.size
        return is_last


def _turns(num_sets: int) -> Iterator[int]:
    while True:
        yield from range(num_sets)


def _draws(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    generator = numpy.random.default_rng(seed)
    chances = numpy.array(probabilities) / sum(probabilities)
    while True:
        drawn = generator.choice(len(chances), size=_DRAWN_AT_ONCE, p=chances)
        yield from (int(number) for number in drawn)


# -------------------------------------------------------------------------------------------------

NO_END = 1 << 40  # what a stream says its length is
KEPT = 4096  # rows that were read last, at least: a step asks for its rows in any order
_HEAD = 1 << 16  # bytes at both ends of a file that its fingerprint is made of
_VERSION = 1


@dataclass(frozen=True)
class StreamSettings:
    """How sets become a stream.

    Attributes:
        media: where pictures are, and how many of a film are taken, as `RowMaker` has it.
        buffer_size: rows that are shuffled together.
        num_held_out: the first so many rows are for evaluation.
        has_limits: rows of a set are limited in number, which a stream cannot do.
    """

    media: dict[str, Any]
    mix: Mix
    probabilities: Sequence[float] | None
    buffer_size: int
    num_held_out: int | float
    has_limits: bool
    seed: int


@dataclass(frozen=True)
class StreamRow:
    """A row that was read and not yet converted.

    Attributes:
        of: number of its set.
        number: in the set.
    """

    of: int
    data: dict[str, Any]
    source: str
    number: int


class StreamDataset:
    """The rows of some sets by their position in an endless stream.

    Reading on is cheap, going back further than the rows that are kept starts from the beginning.

    Raises:
        UserError: the options ask for what a stream cannot do.
    """

    is_stream = True

    def __init__(self, infos: Sequence[SetInfo], options: StreamSettings) -> None:
        _check(infos, options)
        self.options = options
        self.makers = []
        for info in infos:
            files = find_files(info.place, option=info.option)
            if files.kind in ("json", "hub"):
                raise _no_stream(f"{info.option} {info.place}")
            self.makers.append(RowMaker(info, files, **options.media))
        self._bad_rows = current_bad_rows()
        self.held = self._first(int(options.num_held_out))
        self._held_sources = {row.source for row in self.held}
        self._start()

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, position: int) -> tuple[list[Any] | None, dict[str, Any]]:
        row = self._row(position)
        return self.makers[row.of].make(row.data, row.source, number=row.number)

    def describe(self, position: int) -> str:
        """File and line of a row."""
        return self._row(position).source

    def fingerprint(self) -> str:
        """Tells whether another stream has the same rows; of files it reads both ends only."""
        options = self.options
        facts: list[Any] = [_VERSION, options.mix, options.probabilities, options.buffer_size]
        facts += [options.num_held_out, options.seed]
        for maker in self.makers:
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
            maxlen=max(KEPT, self.options.buffer_size)
        )

    def _endless(self) -> Iterator[StreamRow]:
        epoch = 0
        while True:
            generator = numpy.random.default_rng(derive_seed(self.options.seed, "stream", epoch))
            num_rows = 0
            for row in _shuffled(self._left(), self.options.buffer_size, generator):
                num_rows += 1
                yield row
            if num_rows == 0:
                raise DataError(
                    f"the stream of {self._names()} has no row to train on"
                    f"{' behind the held-out ones' if self.held else ''}. At least one was "
                    f"expected: check the files.\n{self._bad_rows.listed(5)}".rstrip()
                )
            epoch += 1

    def _left(self) -> Iterator[StreamRow]:
        """One epoch without the held-out rows, in the order of the files."""
        return (row for row in self._mixed() if row.source not in self._held_sources)

    def _mixed(self) -> Iterator[StreamRow]:
        sets = [_SetStream(self, number) for number in range(len(self.makers))]
        if self.options.mix == "concat" or len(sets) == 1:
            for one in sets:
                yield from one.rows()
            return
        turns = interleave(
            [one.was_last for one in sets],
            over=self.options.mix == "interleave_over",
            probabilities=self.options.probabilities,
            seed=derive_seed(self.options.seed, "mix") % 2**32,
        )
        for chosen in turns:
            yield sets[chosen].take()

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
            f"`dataset.val_size` {count}: the stream of {self._names()} has {len(found)} rows. "
            "More were expected, because its first ones are held out: choose a smaller number."
        )

    def rows_of(self, number: int) -> Iterator[StreamRow]:
        """The good rows of a set, in the order of its files; bad ones go to `current_bad_rows`."""
        maker = self.makers[number]
        count = 0
        for path in maker.files.paths:
            for data, source in _read(path, maker.files.kind):
                # else a row would have a position before it is known to be bad
                if self._bad_rows.limit and not self._is_good(maker, data, source):
                    continue
                yield StreamRow(number, data, source, count)
                count += 1

    @staticmethod
    def _is_good(maker: RowMaker, data: dict[str, Any], source: str) -> bool:
        try:
            maker.convert(data, source, number=0)
        except DataError as error:
            current_bad_rows().take(source, error)
            return False
        return True

    def _names(self) -> str:
        return ", ".join(maker.name for maker in self.makers)


class FirstRows:
    """The held-out rows of a stream, which are few and lie in memory."""

    def __init__(self, stream: StreamDataset) -> None:
        self._makers = stream.makers
        self._rows = stream.held
        self._fingerprint = stream.fingerprint()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        row = self._rows[index]
        return self._makers[row.of].make(row.data, row.source, number=row.number)

    def describe(self, index: int) -> str:
        """File and line of a row."""
        return self._rows[index].source

    def fingerprint(self) -> str:
        """That of the stream."""
        return self._fingerprint


class _SetStream:
    """The rows of one set, again from the beginning after the last."""

    def __init__(self, stream: StreamDataset, number: int) -> None:
        self._stream = stream
        self._number = number
        self._rows: Iterator[StreamRow] = iter(())
        self._ahead: StreamRow | None = None

    def rows(self) -> Iterator[StreamRow]:
        return self._stream.rows_of(self._number)

    def take(self) -> StreamRow:
        if self._ahead is None:
            self._rows = self.rows()
            self._ahead = next(self._rows, None)
        row = self._ahead
        if row is None:
            name = self._stream.makers[self._number].name
            raise DataError(f"the data set {name!r} has no good row. At least one was expected.")
        self._ahead = next(self._rows, None)
        return row

    def was_last(self) -> bool:
        return self._ahead is None


def _read(path: Path, kind: Any) -> Iterator[tuple[dict[str, Any], str]]:
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


def _check(infos: Sequence[SetInfo], options: StreamSettings) -> None:
    if options.buffer_size < 1:
        raise UserError(
            f"`dataset.buffer_size` {options.buffer_size}: at least 1 was expected, because so "
            "many rows are shuffled together; 1 keeps the order of the files."
        )
    is_number = isinstance(options.num_held_out, int)
    if not is_number or options.num_held_out < 0:
        raise UserError(
            f"`dataset.val_size` {options.num_held_out} came with `dataset.streaming`. A number of "
            "rows was expected, because nobody knows how many rows a stream has: its first rows "
            "are held out."
        )
    if options.has_limits or any(info.num_samples is not None for info in infos):
        raise UserError(
            "num_samples or max_samples came with `dataset.streaming`. Neither was expected, "
            "because a stream has no rows to choose from: leave it out, or read the files as a "
            "whole."
        )


def _no_stream(what: str) -> UserError:
    return UserError(
        f"{what} came with `dataset.streaming`. JSON lines, CSV, text, Parquet or Arrow files were "
        "expected, because a JSON list is read as a whole and a set of the hub is not streamed: "
        "write one object a line (.jsonl), or leave streaming out."
    )


def _file_facts(path: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD))
        file.seek(max(size - _HEAD, 0))
        digest.update(file.read(_HEAD))
    return path.name, size, digest.hexdigest()
