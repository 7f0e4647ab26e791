"""Open a corpus and read its segments in place.

Opening reads the `.idx` once (9 bytes a segment), so that no damaged one gives wrong segments, and
both ends of the `.bin`, which finds a truncated or swapped file. Other damage is found by `verify`.
"""

import hashlib
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy

from stageline.corpus.header import (
    BEGINS,
    ENDS,
    HAS_BOS,
    HAS_EOS,
    MEGATRON_MAGIC,
    CorpusHeader,
    CutRules,
    Segments,
    SegmentType,
    TokenizerInfo,
    damaged,
    decode_header,
    edges_digest,
    path_of,
)
from stageline.errors import DataError

# segments and tokens of a step when a whole corpus is walked: memory stays flat
STEP = 1 << 16
TOKENS = 1 << 22


class MappedSegments:
    """A corpus that is read in place. Picklable: a worker opens the files again.

    Attributes:
        prefix: the path prefix as it was given.
        header: the header of the `.idx`.
        type_starts: int64 [types + 1]: segments type_starts[t] to type_starts[t + 1] are type t's.
    """

    prefix: str
    header: CorpusHeader
    _bin: memoryview
    _ids: numpy.ndarray  # the same, as tokens
    _offsets: memoryview  # uint64 [segments + 1], in tokens: its items are plain integers
    _flags: numpy.ndarray  # uint8 [segments]
    _len: int

    def __len__(self) -> int:
        return self._len

    def __reduce__(self) -> tuple:
        return type(self), (os.path.abspath(self.prefix),)

    @property
    def digest(self) -> str:
        """sha256 that stands for the content."""
        return self.header.digest

    @property
    def type_starts(self) -> numpy.ndarray:
        sizes = [kind.num_segments for kind in self.header.types]
        return numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int64)

    def __getitem__(self, index: int) -> numpy.ndarray:
        """Return int64 tokens of a segment, BOS and EOS included; a copy."""
        place = index + self._len if index < 0 else index
        if not 0 <= place < self._len:
            raise IndexError(f"segment {index} of {self._len} in {self.prefix}")
        start, stop = self.bounds(place)
        return self._ids[start:stop].astype(numpy.int64)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the start and stop of a segment, in tokens from the start of the `.bin`."""
        return self._offsets[index], self._offsets[index + 1]

    def lengths(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """Return the int64 numbers of tokens of segments start to stop."""
        stop = self._len if stop is None else stop
        offsets = numpy.frombuffer(self._offsets, dtype="<u8")[start : stop + 1]
        return numpy.diff(offsets).astype(numpy.int64)

    def flags(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """Return uint8 flags of segments start to stop; a view."""
        return self._flags[start : self._len if stop is None else stop]

    def segments(self, start: int, stop: int) -> Segments:
        """Return neighbouring segments with their flags, as a writer takes them."""
        if start >= stop:
            return Segments.join([])
        tokens = self._ids[self.bounds(start)[0] : self.bounds(stop - 1)[1]]
        return Segments(
            tokens.astype(numpy.uint32), self.lengths(start, stop), self.flags(start, stop)
        )

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield neighbouring ranges of segments that fit in memory, from start to stop."""
        low, stop = start, self._len if stop is None else stop
        while low < stop:
            first = self.bounds(low)[0]
            ends = range(low + 1, min(low + STEP, stop) + 1)
            fit = bisect_right(ends, TOKENS, key=lambda end: self.bounds(end - 1)[1] - first)
            high = low + max(1, fit)
            yield low, high
            mapped = self._bin.obj
            if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                # pages that were walked over count as this process's memory until it drops them
                size = self._ids.itemsize
                begin, end = first * size, self.bounds(high - 1)[1] * size
                begin -= begin % mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            low = high

    def ranges(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield ranges like `steps` for code that reads only lengths and flags."""
        stop = self._len if stop is None else stop
        return ((low, min(low + STEP, stop)) for low in range(start, stop, STEP))

    def documents(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (first, last + 1) segment of each document that begins in `start` to `stop`."""
        stop = self._len if stop is None else stop
        open_begins: list[int] = []
        for low, high in self.ranges(start, stop):
            flags = self.flags(low, high)
            begins = open_begins + (numpy.flatnonzero(flags & BEGINS) + low).tolist()
            ends = (numpy.flatnonzero(flags & ENDS) + low + 1).tolist()
            if ends and (not begins or ends[0] <= begins[0]):
                del ends[0]  # its document began before `start`
            yield from zip(begins, ends)
            open_begins = begins[len(ends) :]
        for begin in open_begins:
            while stop < self._len and not self.flags(stop - 1, stop)[0] & ENDS:
                stop += 1
            yield begin, stop

    def document_tokens(self, first: int, last: int) -> numpy.ndarray:
        """Return int64 tokens of segments first to last - 1, without the added BOS and EOS."""
        start, stop = self.bounds(first)[0], self.bounds(last - 1)[1]
        start += bool(self.flags(first, first + 1)[0] & HAS_BOS)
        stop -= bool(self.flags(last - 1, last)[0] & HAS_EOS)
        return self._ids[start:stop].astype(numpy.int64)


def map_file(path: Path) -> memoryview:
    """Map the bytes of a file for reading; the map lives as long as its views."""
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        if Path(f"{path}.part").exists() or Path(f"{path.with_suffix('')}.bin.part").exists():
            raise DataError(
                f"{path} is missing, and next to it are parts of an unfinished corpus. "
                "Run the same `corpus.py write` command again; it continues where it was."
            ) from None
        raise DataError(
            f"{path} is missing. Give the path of a corpus without .idx, or write one first."
        ) from None


# The `.idx` of Megatron-core's `IndexedDataset`, all little-endian and without padding: 9 bytes
# magic, u64 version 1, u8 dtype code, u64 sequences, u64 number of documents + 1; i32 lengths in
# tokens, i64 byte pointers, i64 document index (the number of the first sequence of each document,
# and the number of sequences). Our segment is its sequence. It has neither types nor a tokenizer.
# Source: megatron/core/datasets/indexed_dataset.py, 0.16.1.

_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CODES = {"uint16": 8, "uint32": 4}  # ids below 2^31 are the same bytes as int32


class MegatronCorpus(MappedSegments):
    """A Megatron-core pair of files, one type; its tokenizer is unknown (None in the header).

    Raises:
        DataError: files that are missing, truncated, damaged or not of this format.
    """

    def __init__(self, path_prefix: str | Path) -> None:
        self.prefix = os.fspath(path_prefix)
        path, tokens = path_of(self.prefix, ".idx"), path_of(self.prefix, ".bin")
        index = map_file(path)
        if len(index) < _HEAD.size or index[: len(MEGATRON_MAGIC)] != MEGATRON_MAGIC:
            raise DataError(
                f"{path} is truncated or of another program than Megatron-core. Give the prefix of "
                "an IndexedDataset."
            )
        _, version, code, self._len, num_borders = _HEAD.unpack_from(index)
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{path} has version {version} and dtype code {code}; only version 1 and codes "
                f"{sorted(_DTYPES)} (integers) can be read. Write it with megatron-core 0.16."
            )
        sizes = (_HEAD.size, 4 * self._len, 8 * self._len, 8 * num_borders)
        ends = list(accumulate(sizes))  # a hostile header counts beyond 64 bits
        if len(index) != ends[-1]:
            what = f"it has {len(index):,} bytes, and its header announces {ends[-1]:,}"
            raise damaged(path, what)
        dtype = numpy.dtype(_DTYPES[code]).newbyteorder("<")
        lengths = numpy.frombuffer(index[ends[0] : ends[1]], dtype="<i4")
        pointers = numpy.frombuffer(index[ends[1] : ends[2]], dtype="<i8")
        borders = numpy.frombuffer(index[ends[2] :], dtype="<i8")
        offsets = numpy.concatenate([[0], numpy.cumsum(lengths, dtype=numpy.int64)])
        if (lengths < 0).any() or (pointers != offsets[:-1] * dtype.itemsize).any():
            raise damaged(path, "its sequences do not follow one another")
        whole = num_borders and (borders[0], borders[-1]) == (0, self._len)
        if not whole or (numpy.diff(borders) < 0).any():
            raise damaged(path, f"its documents do not go from sequence 0 to {self._len:,}")
        self._bin = map_file(tokens)
        expected = int(offsets[-1]) * dtype.itemsize
        if len(self._bin) != expected:
            raise damaged(
                tokens, f"it has {len(self._bin):,} bytes, and its index ends at {expected:,}"
            )
        self._ids = numpy.frombuffer(self._bin, dtype=dtype)
        self._offsets = offsets.astype("<u8").data
        self._flags = numpy.zeros(self._len, dtype=numpy.uint8)  # BOS and EOS count as tokens
        self._flags[borders[borders < self._len]] |= BEGINS
        self._flags[borders[borders > 0] - 1] |= ENDS
        self.header = CorpusHeader(
            dtype=self._ids.dtype.name,
            tokenizer=None,
            rules=CutRules(int(lengths.max(initial=0)), adds_bos=False, adds_eos=False),
            language="unknown",
            types=(SegmentType(0, "0", self._len, len(self._ids), num_borders - 1),),
            bin_size=len(self._bin),
            bin_sha256="",
            edges_sha256=edges_digest(tokens),
            arrays_sha256="",
        )

    @property
    def digest(self) -> str:
        """sha256 of sizes and both ends of the two files: they hold no checksum of their own."""
        both = edges_digest(path_of(self.prefix, ".idx")) + self.header.edges_sha256
        return hashlib.sha256(both.encode()).hexdigest()


def write_megatron(corpus: MappedSegments, path_prefix: str | Path, start: int, stop: int) -> None:
    """Write segments start to stop of a Stageline corpus as a Megatron-core pair."""
    path = path_of(path_prefix, ".bin")
    path.parent.mkdir(parents=True, exist_ok=True)
    path_of(path_prefix, ".idx").unlink(missing_ok=True)  # no old index with new tokens
    dtype = numpy.dtype(corpus.header.dtype)
    with open(path, "wb") as file:
        for low, high in corpus.steps(start, stop):
            file.write(corpus.segments(low, high).tokens.astype(dtype.newbyteorder("<")).data)
    lengths = corpus.lengths(start, stop)
    ends = numpy.cumsum(lengths)
    borders = numpy.append(numpy.flatnonzero(corpus.flags(start, stop) & BEGINS), stop - start)
    part = path_of(path_prefix, ".idx.part")
    with open(part, "wb") as file:
        file.write(_HEAD.pack(MEGATRON_MAGIC, 1, _CODES[dtype.name], stop - start, len(borders)))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        file.write(borders.astype("<i8").tobytes())
    os.replace(part, path_of(path_prefix, ".idx"))


class Corpus(MappedSegments):
    """A corpus that `CorpusWriter` wrote.

    Raises:
        DataError: a file is missing, truncated, swapped, foreign, damaged or of a newer version.
    """

    def __init__(self, path_prefix: str | Path) -> None:
        self.prefix = os.fspath(path_prefix)
        path, tokens = path_of(self.prefix, ".idx"), path_of(self.prefix, ".bin")
        index = map_file(path)
        self.header, arrays = decode_header(index, path)
        self._len = self.header.num_segments
        flags = arrays + 8 * (self._len + 1)
        if len(index) != flags + self._len:
            announced = f"its header announces {flags + self._len:,}"
            raise damaged(path, f"it has {len(index):,} bytes, and {announced}")
        self._offsets = index[arrays:flags].cast("Q")
        self._flags = numpy.frombuffer(index[flags:], dtype=numpy.uint8)
        both = "".join(
            hashlib.sha256(one).hexdigest() for one in (index[arrays:flags], index[flags:])
        )
        if hashlib.sha256(both.encode()).hexdigest() != self.header.arrays_sha256:
            raise damaged(path, "the offsets or flags are not those that were written (sha256)")
        self._bin = map_file(tokens)
        if len(self._bin) != self.header.bin_size:
            written = f"its index was written for {self.header.bin_size:,}"
            raise damaged(tokens, f"it has {len(self._bin):,} bytes, and {written}")
        if edges_digest(tokens) != self.header.edges_sha256:
            raise damaged(tokens, "it or its .idx was swapped with another corpus's")
        # a plain array over the map: its slices cost half of numpy.memmap's
        dtype = numpy.dtype(self.header.dtype).newbyteorder("<")
        self._ids = numpy.frombuffer(self._bin, dtype=dtype)

    @property
    def tokenizer(self) -> TokenizerInfo:
        """The tokenizer of the corpus; a Stageline corpus always has one."""
        assert self.header.tokenizer is not None
        return self.header.tokenizer


def open_corpus(path_prefix: str | Path) -> MappedSegments:
    """Open a Stageline corpus or a Megatron-core pair, as the first bytes of the `.idx` tell."""
    start = map_file(path_of(path_prefix, ".idx"))[: len(MEGATRON_MAGIC)]
    kind = MegatronCorpus if start == MEGATRON_MAGIC else Corpus
    return kind(path_prefix)
