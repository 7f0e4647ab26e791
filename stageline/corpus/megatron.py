"""Reads and writes the files of Megatron-core's `IndexedDataset` (MMapIndexedDataset).

Its `.idx`, all little-endian and without padding: 9 bytes magic, u64 version 1, u8 dtype code,
u64 sequences, u64 documents + 1; i32 lengths in tokens, i64 byte pointers, i64 document index
(the number of the first sequence of each document, and the number of sequences).
Our segment is its sequence, our document its document. It knows neither types nor a tokenizer.
Source: megatron/core/datasets/indexed_dataset.py, 0.16.1.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy

from stageline.corpus.header import MEGATRON_MAGIC, CorpusHeader, SegmentType, edges_digest, path_of
from stageline.corpus.mapped import MappedSegments, map_file
from stageline.corpus.segments import BEGINS, ENDS, CutRules
from stageline.errors import DataError

_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {"uint16": 8, "uint32": 4}  # ids below 2^31 are the same bytes as int32


class MegatronCorpus(MappedSegments):
    """A Megatron-core pair of files, one type; its tokenizer is unknown (None in the header).

    Raises:
        DataError: files that are missing, truncated or not of this format.
    """

    def __init__(self, path_prefix: str | Path) -> None:
        self.prefix = os.fspath(path_prefix)
        path = path_of(self.prefix, ".idx")
        index = map_file(path)
        dtype, self._len, num_documents = _read_head(index, path)
        ends = numpy.cumsum([_HEAD.size, 4 * self._len, 8 * self._len, 8 * (num_documents + 1)])
        if len(index) != ends[-1]:
            raise DataError(
                f"{path} has {len(index):,} bytes; its header announces {ends[-1]:,}: the file was"
                " cut or added to. Copy it again."
            )
        self._lengths = index[ends[0] : ends[1]].cast("i")
        self._pointers = index[ends[1] : ends[2]].cast("q")
        self._starts = numpy.frombuffer(index[ends[2] :], dtype="<i8")
        self._bin = map_file(path_of(self.prefix, ".bin"))
        self._ids = self._map_ids(numpy.dtype(dtype).newbyteorder("<"))
        self.header = self._make_header(num_documents)

    def bounds(self, index: int) -> tuple[int, int]:
        """Where a segment's tokens begin and end, in tokens from the start of the `.bin`."""
        start = self._pointers[index] // self._ids.itemsize
        return start, start + self._lengths[index]

    def lengths(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """int64 number of tokens of segments start to stop."""
        stop = self._len if stop is None else stop
        return numpy.array(self._lengths[start:stop], dtype=numpy.int64)

    def flags(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """uint8: where documents begin and end; BOS and EOS are not told apart from tokens."""
        stop = self._len if stop is None else stop
        flags = numpy.zeros(stop - start, dtype=numpy.uint8)
        low, high = numpy.searchsorted(self._starts, [start, stop + 1])
        borders = self._starts[low:high] - start
        flags[borders[borders < stop - start]] |= BEGINS
        flags[borders[borders > 0] - 1] |= ENDS
        return flags

    @property
    def digest(self) -> str:
        """sha256 of sizes and both ends of the two files: they hold no checksum of their own."""
        both = edges_digest(path_of(self.prefix, ".idx")) + self.header.edges_sha256
        return hashlib.sha256(both.encode()).hexdigest()

    def _map_ids(self, dtype: numpy.dtype) -> numpy.ndarray:
        # the last sequence ends the file: enough to find a truncated .bin without a walk
        expected = self._pointers[-1] + self._lengths[-1] * dtype.itemsize if self._len else 0
        if len(self._bin) != expected:
            raise DataError(
                f"{self.prefix}.bin has {len(self._bin):,} bytes; its index ends at {expected:,}:"
                " the file was truncated, or the .idx is of another one. Copy both again."
            )
        return numpy.frombuffer(self._bin, dtype=dtype)

    def _make_header(self, num_documents: int) -> CorpusHeader:
        num_tokens = len(self._ids)
        longest = int(numpy.frombuffer(self._lengths, dtype="<i4").max()) if self._len else 0
        return CorpusHeader(
            dtype=self._ids.dtype.name,
            tokenizer=None,
            rules=CutRules(longest, adds_bos=False, adds_eos=False),
            language="unknown",
            types=(SegmentType(0, "0", self._len, num_tokens, num_documents),),
            bin_size=len(self._bin),
            bin_sha256="",
            edges_sha256=edges_digest(path_of(self.prefix, ".bin")),
            arrays_sha256="",
            made_by="megatron-core",
        )


def write_megatron(
    corpus: MappedSegments, path_prefix: str | Path, *, start: int = 0, stop: int | None = None
) -> None:
    """Writes segments start to stop of a corpus of ours as a Megatron-core pair."""
    stop = len(corpus) if stop is None else stop
    path = path_of(path_prefix, ".bin")
    path.parent.mkdir(parents=True, exist_ok=True)
    path_of(path_prefix, ".idx").unlink(missing_ok=True)  # never an old index beside new tokens
    with open(path, "wb") as file:
        for low, high in corpus.steps(start, stop):
            file.write(corpus.token_bytes(low, high))
    part = path_of(path_prefix, ".idx.part")
    with open(part, "wb") as file:
        for piece in _index_pieces(corpus, start, stop):
            file.write(piece)
    os.replace(part, path_of(path_prefix, ".idx"))


def _index_pieces(corpus: MappedSegments, start: int, stop: int) -> Iterator[bytes]:
    code, size = _CODES[corpus.header.dtype], numpy.dtype(corpus.header.dtype).itemsize
    num_documents = sum(len(_begins(corpus, low, high)) for low, high in corpus.ranges(start, stop))
    yield _HEAD.pack(MEGATRON_MAGIC, 1, code, stop - start, num_documents + 1)
    for low, high in corpus.ranges(start, stop):
        yield corpus.lengths(low, high).astype("<i4").tobytes()
    written = 0
    for low, high in corpus.ranges(start, stop):
        ends = written + numpy.cumsum(corpus.lengths(low, high)) * size
        yield numpy.concatenate([[written], ends[:-1]]).astype("<i8").tobytes()
        written = int(ends[-1])
    for low, high in corpus.ranges(start, stop):
        yield (_begins(corpus, low, high) - start).astype("<i8").tobytes()
    yield struct.pack("<q", stop - start)


def _begins(corpus: MappedSegments, low: int, high: int) -> numpy.ndarray:
    return low + numpy.flatnonzero(corpus.flags(low, high) & BEGINS)


def _read_head(index: memoryview, path: Path) -> tuple[str, int, int]:
    """dtype, sequences, documents."""
    if len(index) < _HEAD.size or index[: len(MEGATRON_MAGIC)] != MEGATRON_MAGIC:
        raise DataError(
            f"{path} does not begin like an index of Megatron-core ({MEGATRON_MAGIC!r}): the file"
            " is truncated or of another program. Give the prefix of an IndexedDataset."
        )
    _, version, code, num_sequences, num_borders = _HEAD.unpack_from(index)
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{path} has version {version} and dtype code {code}; read are version 1 and codes"
            f" {sorted(_DTYPES)} (integers), those of megatron-core 0.16. Write it with that one."
        )
    return _DTYPES[code], num_sequences, num_borders - 1
