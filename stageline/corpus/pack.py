"""Pack the segments of a corpus into rows: PREFIX.pack lists the segments of each row.

PREFIX.pack: preamble (24 bytes), JSON, zeros up to a page; then uint64 offsets[rows + 1], counted
in members, and uint64 members, which are numbers of segments. A row has segments of one type, and
the rows of a type are one range. Attention has to keep the segments of a row apart: positions
restart at each.

Rows are filled best-fit decreasing within windows of neighbouring segments of one type, so memory
does not grow with the corpus. Each window leaves a few rows unfilled, which is negligible for a
million segments.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from filelock import FileLock

from stageline.corpus.corpus_files import map_file, open_corpus
from stageline.corpus.header import BEGINS, ENDS, damaged, framed, path_of, unframed
from stageline.corpus.writer import GrowingFile
from stageline.errors import DataError, UserError


def best_fit(lengths: numpy.ndarray, capacity: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Assign lengths to rows by best-fit decreasing packing.

    The longest come first, each into the row with the least room that takes it.

    Args:
        lengths: int64 [N], 0 < length <= capacity.

    Returns:
        ends: int64 [rows]: row r has members[ends[r - 1] : ends[r]].
        members: int64 [N], indices of lengths: rising within a row; rows in the order of their
            first members.
    """
    if not len(lengths):
        return numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.int64)
    assert 0 < lengths.min() and lengths.max() <= capacity
    rows, row_of = _Rows(capacity), numpy.zeros(len(lengths), numpy.int64)
    by_size = numpy.argsort(lengths, kind="stable")
    sizes, starts = numpy.unique(lengths[by_size], return_index=True)
    for size, members in reversed(list(zip(sizes.tolist(), numpy.split(by_size, starts[1:])))):
        for filled, each in rows.put(size, len(members)):
            placed, members = numpy.split(members, [len(filled) * each])
            row_of[placed] = numpy.repeat(numpy.arange(filled.start, filled.stop), each)
    _, first_members = numpy.unique(row_of, return_index=True)
    rank = numpy.empty_like(first_members)
    rank[numpy.argsort(first_members)] = numpy.arange(len(first_members))
    row_of = rank[row_of]
    return numpy.cumsum(numpy.bincount(row_of)), numpy.argsort(row_of, kind="stable")


def rows_of_best_fit(histogram: numpy.ndarray) -> int:
    """Return the number of rows that best-fit decreasing fills.

    This is as quick for a billion segments as for a thousand.

    Args:
        histogram: [seq_length + 1], number of segments of each length.
    """
    rows = _Rows(len(histogram) - 1)
    for size in range(len(histogram) - 1, 0, -1):
        for _ in rows.put(size, int(histogram[size])):
            pass
    return rows.num_rows


class _Rows:
    """Rows by their remaining space.

    Rows with equal space are alike: all lengths of one size go into all rows of one space at once.
    """

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        self._capacity = capacity
        self._with_room: list[list[range]] = [[] for _ in range(capacity + 1)]
        self._rooms = 0  # bit r is set where there are rows of room r

    def put(self, size: int, count: int) -> Iterator[tuple[range, int]]:
        """Put lengths of one size into the tightest rows that take them, then into new ones.

        Yields:
            (rows, how many lengths each of them got).
        """
        while count:
            room, rows = self._tightest(size, count)
            each = room // size
            num_full, rest = divmod(min(count, len(rows) * each), each)
            count -= num_full * each + rest
            full, part = rows[:num_full], rows[num_full : num_full + bool(rest)]
            self._add(room, rows[num_full + bool(rest) :])
            self._add(room - each * size, full)
            self._add(room - rest * size, part)
            yield from ((some, number) for some, number in ((full, each), (part, rest)) if some)

    def _tightest(self, size: int, count: int) -> tuple[int, range]:
        fitting = self._rooms >> size
        if not fitting:
            first = self.num_rows
            self.num_rows += -(-count // (self._capacity // size))
            return self._capacity, range(first, self.num_rows)
        room = size + (fitting & -fitting).bit_length() - 1
        rows = self._with_room[room].pop()
        if not self._with_room[room]:
            self._rooms ^= 1 << room
        return room, rows

    def _add(self, room: int, rows: range) -> None:
        if rows:
            self._with_room[room].append(rows)
            self._rooms |= 1 << room


MAGIC = b"STAGLPAK"
VERSION = 1


@dataclass(frozen=True)
class PackHeader:
    """Header of packed rows."""

    row_length: int  # tokens of a row at most
    corpus: str  # digest of the corpus whose segments they hold
    num_rows: list[int]  # one number for each type
    num_segments: list[int]
    num_tokens: list[int]
    arrays_sha256: str  # hash of offsets, then members
    version: int = VERSION


class PackedRows:
    """The packed rows of a corpus: `rows[i]` are the segments of row i. Picklable.

    Attributes:
        row_length: tokens of a row at most.
        type_starts: int64 [types + 1]: rows type_starts[t] to type_starts[t + 1] are of type t.
        digest: stands for the content.

    Raises:
        DataError: there are none, they are damaged, or of another corpus.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = os.fspath(prefix)
        path = path_of(prefix, ".pack")
        if not path.exists():
            raise DataError(f"{path} is missing. Make the rows first (corpus.py pack).")
        file = map_file(path)
        self.header, start = unframed(file, path, MAGIC, VERSION, lambda own: PackHeader(**own))
        if open_corpus(prefix).digest != self.header.corpus:
            raise DataError(
                f"{path} was made of other segments than {prefix}.bin has now. Pack it again "
                "(corpus.py pack)."
            )
        self._num_rows, num_segments = sum(self.header.num_rows), sum(self.header.num_segments)
        middle = start + 8 * (self._num_rows + 1)
        expected = middle + 8 * num_segments
        if len(file) != expected:
            what = f"it has {len(file):,} bytes, and its header announces {expected:,}"
            raise damaged(path, what)
        self._arrays = file[start:]
        self._offsets = numpy.frombuffer(file[start:middle], "<i8")
        self._members = numpy.frombuffer(file[middle:], "<i8")
        offsets, members = self._offsets, self._members
        if (offsets[0], offsets[-1]) != (0, num_segments) or (offsets[1:] < offsets[:-1]).any():
            raise damaged(path, f"its rows do not go from segment 0 to {num_segments:,} in order")
        if num_segments and not 0 <= members.min() <= members.max() < num_segments:
            raise damaged(path, f"a row holds a segment beyond {num_segments:,}")
        self.row_length = self.header.row_length
        self.type_starts = numpy.cumsum([0, *self.header.num_rows], dtype=numpy.int64)
        self.digest = hashlib.sha256(json.dumps(asdict(self.header)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> numpy.ndarray:
        """Return int64 numbers of the segments of a row, rising."""
        place = row + self._num_rows if row < 0 else row
        if not 0 <= place < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows} in {self.prefix}.pack")
        return self._members[self._offsets[place] : self._offsets[place + 1]].astype(numpy.int64)

    def __reduce__(self) -> tuple:
        return type(self), (os.path.abspath(self.prefix),)

    def members(self, rows: numpy.ndarray) -> numpy.ndarray:
        """Return int64 numbers of the segments of several rows, row after row."""
        counts = self._offsets[rows + 1] - self._offsets[rows]
        firsts = numpy.repeat(self._offsets[rows] - (numpy.cumsum(counts) - counts), counts)
        return self._members[firsts + numpy.arange(counts.sum())].astype(numpy.int64)

    @property
    def padding(self) -> float:
        """Share of all places in the rows that no token fills."""
        return 1 - sum(self.header.num_tokens) / max(self._num_rows * self.row_length, 1)

    def verify(self) -> None:
        """Read everything once, and raise DataError if the file was changed."""
        if hashlib.sha256(self._arrays).hexdigest() != self.header.arrays_sha256:
            raise damaged(path_of(self.prefix, ".pack"), "its checksum does not fit")


WINDOW = 1 << 20  # segments
_PARTS = (".pack.offsets.part", ".pack.members.part", ".pack.part")


def pack_corpus(
    prefix: str | Path, row_length: int | None = None, *, overwrite: bool = False
) -> PackedRows:
    """Pack the segments of each type into rows, and write PREFIX.pack; whole or not at all.

    Where the same rows are there already, nothing is done.

    Args:
        row_length: tokens of a row; None: the `seq_length` of the corpus.
        overwrite: in place of rows of another length.

    Raises:
        UserError: a segment is longer than a row, or rows of another length are there.
        StorageError: it cannot be written.
    """
    corpus = open_corpus(prefix)
    row_length = row_length or corpus.header.rules.seq_length
    with contextlib.suppress(DataError):  # no packed rows yet, or none that can be used
        there = PackedRows(prefix)
        if not overwrite:
            if there.row_length == row_length:
                return there
            raise UserError(
                f"{prefix}.pack has rows of {there.row_length} tokens, not of {row_length}. "
                "Add `overwrite`, or pack a copy of the corpus."
            )
    with contextlib.ExitStack() as stack:
        files = []
        for path in (path_of(prefix, part) for part in _PARTS):
            stack.callback(path.unlink, missing_ok=True)
            files.append(stack.enter_context(contextlib.closing(GrowingFile(path))))
        offsets, members, whole = files
        kinds = corpus.header.types
        num_rows = [0] * len(kinds)
        offsets.write(bytes(8))
        for place, stop in enumerate(corpus.type_starts[1:].tolist()):
            for low in range(stop - kinds[place].num_segments, stop, WINDOW):
                lengths = corpus.lengths(low, min(low + WINDOW, stop))
                longest = int(lengths.argmax())
                if lengths[longest] > row_length:
                    raise UserError(
                        f"segment {low + longest} of {corpus.prefix} has {lengths[longest]} "
                        f"tokens, more than a row of {row_length}. Give longer rows."
                    )
                ends, packed = best_fit(lengths, row_length)
                offsets.write((ends + low).astype("<u8").tobytes())  # `low` members before them
                members.write((packed + low).astype("<u8").tobytes())
                num_rows[place] += len(ends)
        digest = hashlib.sha256()
        for file in (offsets, members):
            file.sync()
            digest.update(map_file(file.path))
        header = PackHeader(
            row_length=row_length,
            corpus=corpus.digest,
            num_rows=num_rows,
            num_segments=[kind.num_segments for kind in kinds],
            num_tokens=[kind.num_tokens for kind in kinds],
            arrays_sha256=digest.hexdigest(),
        )
        whole.write(framed(MAGIC, VERSION, json.dumps(asdict(header))))
        for file in (offsets, members):
            whole.write(map_file(file.path))
        whole.sync()
        os.replace(whole.path, path_of(prefix, ".pack"))
    return PackedRows(prefix)


def open_packed(prefix: str, row_length: int | None) -> PackedRows:
    """Return the packed rows of a corpus; one process of a machine makes missing ones."""
    if path_of(prefix, ".pack").exists():  # the folder may be read-only, without room for a lock
        rows = PackedRows(prefix)
        return rows if row_length in (None, rows.row_length) else pack_corpus(prefix, row_length)
    with FileLock(f"{prefix}.pack.lock"):
        return pack_corpus(prefix, row_length)


@dataclass(frozen=True)
class TypeStats:
    """Figures of one type, or of all of them together.

    Attributes:
        num_rows: rows of seq_length by the way of filling them: `segments` (one a row), `packed`
            (best-fit decreasing), `chunks` (all in one stream, cut every seq_length tokens).
    """

    name: str
    num_segments: int
    num_tokens: int
    num_documents: int
    num_cut_documents: int  # that needed more than one segment
    num_chunk_cuts: int  # documents of one segment that `chunks` would cut in two
    histogram: numpy.ndarray  # int64 [seq_length + 1]: how many segments have 0, 1, ... tokens
    num_rows: dict[str, int]

    @property
    def seq_length(self) -> int:
        return len(self.histogram) - 1

    @property
    def padding(self) -> dict[str, float]:
        """Share of the rows that is padding, for each way of filling them."""
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
        names = ["num_segments", "num_tokens", "num_documents", "num_cut_documents"]
        names += ["num_chunk_cuts", "histogram"]
        sums = [sum(getattr(kind, name) for kind in self.types) for name in names]
        ways = self.types[0].num_rows
        rows = {way: sum(kind.num_rows[way] for kind in self.types) for way in ways}
        return TypeStats(name="all", num_rows=rows, **dict(zip(names, sums, strict=True)))


def stats(prefix: str | Path) -> Stats:
    """Return counts from the index of a corpus, not from its tokens."""
    corpus = open_corpus(prefix)
    limit = corpus.header.rules.seq_length
    starts, types = corpus.type_starts.tolist(), []
    for kind, start, stop in zip(corpus.header.types, starts, starts[1:]):
        histogram = numpy.zeros(limit + 1, dtype=numpy.int64)
        num_cut = num_chunk_cuts = position = 0
        for low, high in corpus.ranges(start, stop):
            lengths, both = corpus.lengths(low, high), corpus.flags(low, high) & (BEGINS | ENDS)
            histogram += numpy.bincount(lengths, minlength=limit + 1)
            num_cut += int(numpy.count_nonzero(both == BEGINS))
            ends = position + numpy.cumsum(lengths)
            is_cut = (ends - lengths) // max(limit, 1) != (ends - 1) // max(limit, 1)
            num_chunk_cuts += int(numpy.count_nonzero((both == BEGINS | ENDS) & is_cut))
            position = int(ends[-1])
        packed, chunks = rows_of_best_fit(histogram), -(-kind.num_tokens // max(limit, 1))
        rows = {"segments": kind.num_segments, "packed": packed, "chunks": chunks}
        counts = (kind.num_segments, kind.num_tokens, kind.num_documents, num_cut, num_chunk_cuts)
        types.append(TypeStats(kind.name, *counts, histogram, rows))
    return Stats(corpus.prefix, limit, tuple(types))
