"""Figures of a corpus: lengths of segments, tokens of each type, what rows cost in padding."""

from dataclasses import dataclass
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import open_corpus
from stageline.corpus.header import SegmentType
from stageline.corpus.mapped import MappedSegments
from stageline.corpus.segments import BEGINS, ENDS


@dataclass(frozen=True)
class TypeStats:
    """Figures of one type, or of all of them together.

    Attributes:
        num_cut_documents: that needed more than one segment.
        histogram: int64 [seq_length + 1]: how many segments have 0, 1, ... tokens.
        num_rows: rows of seq_length by the way of filling them: `segments` (one a row), `packed`
            (best-fit decreasing), `chunks` (all in one stream, cut every seq_length tokens).
        num_chunk_cuts: documents of one segment that `chunks` would cut in two.
    """

    name: str
    num_segments: int
    num_tokens: int
    num_documents: int
    num_cut_documents: int
    histogram: numpy.ndarray
    num_rows: dict[str, int]
    num_chunk_cuts: int

    @property
    def seq_length(self) -> int:
        return len(self.histogram) - 1

    @property
    def padding(self) -> dict[str, float]:
        """Share of all places in the rows that no token fills, by the way of filling them."""
        places = {way: rows * self.seq_length for way, rows in self.num_rows.items()}
        return {way: 1 - self.num_tokens / max(size, 1) for way, size in places.items()}


@dataclass(frozen=True)
class Stats:
    """Figures of a corpus; each type fills its own rows."""

    prefix: str
    seq_length: int
    types: tuple[TypeStats, ...]

    @property
    def whole(self) -> TypeStats:
        """All types together."""
        ways = self.types[0].num_rows
        names = ("num_segments", "num_tokens", "num_documents", "num_cut_documents")
        return TypeStats(
            name="all",
            histogram=numpy.sum([kind.histogram for kind in self.types], axis=0),
            num_rows={way: sum(kind.num_rows[way] for kind in self.types) for way in ways},
            num_chunk_cuts=sum(kind.num_chunk_cuts for kind in self.types),
            **{name: sum(getattr(kind, name) for kind in self.types) for name in names},
        )


def stats(prefix: str | Path) -> Stats:
    """Walks the index of a corpus (ours or Megatron-core's), never its tokens.

    Raises:
        DataError: it cannot be opened.
    """
    corpus = open_corpus(prefix)
    starts = corpus.type_starts.tolist()
    kinds = zip(corpus.header.types, starts, starts[1:])
    return Stats(
        prefix=corpus.prefix,
        seq_length=corpus.header.rules.seq_length,
        types=tuple(_type_stats(corpus, kind, start, stop) for kind, start, stop in kinds),
    )


def rows_of_best_fit(histogram: numpy.ndarray) -> int:
    """How many rows best-fit decreasing fills with segments of these lengths.

    Counts rows by the room left in them, so that it takes as long for a billion segments as for
    a thousand.

    Args:
        histogram: [seq_length + 1], how many segments of each length.
    """
    rows = _OpenRows(len(histogram) - 1)
    for size in range(len(histogram) - 1, 0, -1):
        rows.put(size, int(histogram[size]))
    return rows.num_rows


class _OpenRows:
    """How many rows have how much room left."""

    def __init__(self, limit: int) -> None:
        self.num_rows = 0
        self._limit = limit
        self._counts = [0] * (limit + 1)
        self._rooms = 0  # bit r is set where there are rows of room r

    def put(self, size: int, count: int) -> None:
        """Puts segments of one size into the tightest rows that take them, then into new ones."""
        while count:
            fitting = self._rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                there = self._counts[room]
            else:
                room, there = self._limit, -(-count // (self._limit // size))
                self.num_rows += there
                self._add(room, there)
            count -= self._fill(room, there, size, count)

    def _fill(self, room: int, there: int, size: int, count: int) -> int:
        """Fills rows of one room one after the other; returns how many segments they took."""
        each = room // size
        full, rest = divmod(min(count, there * each), each)
        self._add(room, -full - bool(rest))
        self._add(room - each * size, full)
        if rest:
            self._add(room - rest * size, 1)
        return full * each + rest

    def _add(self, room: int, count: int) -> None:
        self._counts[room] += count
        if self._counts[room]:
            self._rooms |= 1 << room
        else:
            self._rooms &= ~(1 << room)


def _type_stats(corpus: MappedSegments, kind: SegmentType, start: int, stop: int) -> TypeStats:
    limit = corpus.header.rules.seq_length
    histogram = numpy.zeros(limit + 1, dtype=numpy.int64)
    num_cut = num_chunk_cuts = position = 0
    for low, high in corpus.ranges(start, stop):
        lengths, flags = corpus.lengths(low, high), corpus.flags(low, high)
        histogram += numpy.bincount(lengths, minlength=limit + 1)
        num_cut += int(numpy.count_nonzero(flags & (BEGINS | ENDS) == BEGINS))
        ends = position + numpy.cumsum(lengths)
        is_whole = flags & (BEGINS | ENDS) == BEGINS | ENDS
        is_cut = (ends - lengths) // max(limit, 1) != (ends - 1) // max(limit, 1)
        num_chunk_cuts += int(numpy.count_nonzero(is_whole & is_cut))
        position = int(ends[-1])
    return TypeStats(
        name=kind.name,
        num_segments=kind.num_segments,
        num_tokens=kind.num_tokens,
        num_documents=kind.num_documents,
        num_cut_documents=num_cut,
        histogram=histogram,
        num_rows={
            "segments": kind.num_segments,
            "packed": rows_of_best_fit(histogram),
            "chunks": -(-kind.num_tokens // max(limit, 1)),
        },
        num_chunk_cuts=num_chunk_cuts,
    )
