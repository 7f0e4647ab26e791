"""Packed rows of a corpus: which segments share a row.

PREFIX.pack: preamble (24 bytes), JSON, zeros up to a page; then uint64 offsets[rows + 1], counted
in members, and uint64 members, which are numbers of segments. A row has segments of one type, and
the rows of a type are one range. Attention has to keep the segments of a row apart: positions
restart at each.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import open_corpus
from stageline.corpus.header import PAGE, path_of
from stageline.corpus.mapped import MappedSegments, map_file
from stageline.errors import DataError

MAGIC = b"STAGLPAK"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIII4x")  # magic, version, bytes of the JSON, its crc32


@dataclass(frozen=True)
class PackHeader:
    """What packed rows know of themselves.

    Attributes:
        row_length: tokens of a row at most.
        corpus: digest of the corpus whose segments they hold.
        window: so many neighbouring segments of a type were packed together.
        num_rows, num_segments, num_tokens: of each type.
        arrays_sha256: of offsets, then members.
    """

    row_length: int
    corpus: str
    window: int
    num_rows: list[int]
    num_segments: list[int]
    num_tokens: list[int]
    arrays_sha256: str
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
        file = _map_pack(path)
        self.header, start = _decode(file, path)
        if open_corpus(prefix).digest != self.header.corpus:
            raise DataError(
                f"{path} was made of other segments than {prefix}.bin has: the corpus was written "
                "anew since. Rows of this corpus were expected: pack it again (corpus.py pack)."
            )
        self._num_rows = sum(self.header.num_rows)
        middle = start + 8 * (self._num_rows + 1)
        expected = middle + 8 * sum(self.header.num_segments)
        if len(file) != expected:
            raise DataError(
                f"{path} has {len(file):,} bytes; its header announces {expected:,}: the file was "
                "cut or added to. Pack the corpus again (corpus.py pack)."
            )
        self._arrays = file[start:]
        self._offsets, self._members = file[start:middle].cast("Q"), file[middle:].cast("Q")
        self.row_length = self.header.row_length
        self.type_starts = numpy.cumsum([0, *self.header.num_rows], dtype=numpy.int64)
        self.digest = hashlib.sha256(json.dumps(asdict(self.header)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> numpy.ndarray:
        """int64 numbers of the segments of a row, rising."""
        place = row + self._num_rows if row < 0 else row
        if not 0 <= place < self._num_rows:
            raise IndexError(f"row {row} of {self._num_rows} in {self.prefix}.pack")
        start, stop = self._offsets[place], self._offsets[place + 1]
        return numpy.frombuffer(self._members, "<u8", stop - start, 8 * start).astype(numpy.int64)

    def __reduce__(self) -> tuple:
        return _open_again, (os.path.abspath(self.prefix), self.prefix, self.digest)

    def members(self, rows: numpy.ndarray) -> numpy.ndarray:
        """int64 numbers of the segments of several rows, row after row."""
        offsets = numpy.frombuffer(self._offsets, "<u8").astype(numpy.int64)
        counts = offsets[rows + 1] - offsets[rows]
        firsts = numpy.repeat(offsets[rows] - (numpy.cumsum(counts) - counts), counts)
        places = firsts + numpy.arange(counts.sum())
        return numpy.frombuffer(self._members, "<u8")[places].astype(numpy.int64)

    @property
    def padding(self) -> float:
        """Share of all places in the rows that no token fills."""
        return 1 - sum(self.header.num_tokens) / max(self._num_rows * self.row_length, 1)

    def verify(self) -> None:
        """Reads everything once: each segment is in one row, and no row is too long.

        Raises:
            DataError: it is not so, or the file was changed.
        """
        wrong = self._fault()
        if wrong:
            raise DataError(
                f"{self.prefix}.pack is damaged: {wrong}. Pack the corpus again (corpus.py pack)."
            )

    def _fault(self) -> str | None:
        if hashlib.sha256(self._arrays).hexdigest() != self.header.arrays_sha256:
            return "its checksum does not fit"
        corpus = open_corpus(self.prefix)
        members = numpy.frombuffer(self._members, "<u8")
        for low, high in windows(corpus, self.header.window):
            if (numpy.sort(members[low:high]) != numpy.arange(low, high)).any():
                return f"segments {low} to {high - 1} are not once each in its rows"
        offsets = numpy.frombuffer(self._offsets, "<u8")
        for low in range(0, self._num_rows, self.header.window):
            ends = offsets[low : low + self.header.window + 1].astype(numpy.int64)
            here = members[ends[0] : ends[-1]].astype(numpy.int64)
            first = int(here.min())  # rows of a few windows: their segments lie together
            lengths = corpus.lengths(first, int(here.max()) + 1)[here - first]
            if numpy.add.reduceat(lengths, ends[:-1] - ends[0]).max() > self.row_length:
                return f"a row has more than {self.row_length} tokens"
        return None


def windows(corpus: MappedSegments, window: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring segments of one type."""
    starts = corpus.type_starts.tolist()
    for first, stop in zip(starts, starts[1:], strict=False):
        for low in range(first, stop, window):
            yield low, min(low + window, stop)


def encode_pack_header(header: PackHeader) -> bytes:
    """Preamble and JSON, filled up with zeros so that the arrays begin on a page."""
    text = json.dumps(asdict(header)).encode()
    whole = _PREAMBLE.pack(MAGIC, header.version, len(text), zlib.crc32(text)) + text
    return whole + bytes(-len(whole) % PAGE)


def _decode(file: memoryview, path: Path) -> tuple[PackHeader, int]:
    """The header, and where the arrays begin."""
    fits = len(file) >= _PREAMBLE.size
    magic, version, size, crc = _PREAMBLE.unpack_from(file) if fits else (b"", 0, 0, 0)
    if magic == MAGIC and version > VERSION:
        raise DataError(
            f"{path} has format version {version}; this program reads versions up to {VERSION}, "
            "as a newer one wrote the file: update Stageline, or pack the corpus again."
        )
    text = bytes(file[_PREAMBLE.size : _PREAMBLE.size + size])
    if magic != MAGIC or zlib.crc32(text) != crc:
        raise DataError(
            f"{path} does not begin as packed rows do, or its header is damaged. Rows that "
            "corpus.py pack wrote were expected: pack the corpus again."
        )
    end = _PREAMBLE.size + size
    return PackHeader(**json.loads(text)), end + -end % PAGE


def _map_pack(path: Path) -> memoryview:
    if not path.exists():
        raise DataError(
            f"{path} is missing. Packed rows were expected, because they were asked for: make them "
            "first (corpus.py pack)."
        )
    return map_file(path)


def _open_again(path: str, prefix: str, digest: str) -> PackedRows:
    rows = PackedRows(path)
    if rows.digest != digest:
        raise DataError(
            f"{path}.pack has other rows than when this process was given them: it was packed anew "
            "meanwhile. Start the run again."
        )
    rows.prefix = prefix
    return rows
