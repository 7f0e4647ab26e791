"""Segments read through memory maps: what readers of both formats share.

A subclass knows where segment i begins and how long it is; here lies what follows from that.
"""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy

from stageline.corpus.header import CorpusHeader
from stageline.corpus.segments import BEGINS, ENDS, HAS_BOS, HAS_EOS, Segments
from stageline.errors import DataError

# segments and tokens of a step when a whole corpus is walked: memory stays flat
STEP = 1 << 16
TOKENS = 1 << 22


class MappedSegments:
    """A corpus that is read in place. Picklable: a worker opens the files again.

    Attributes:
        prefix: the path prefix as it was given.
        header: what the corpus says of itself.
        type_starts: int64 [types + 1]: segments type_starts[t] to type_starts[t + 1] are type t's.
    """

    prefix: str
    header: CorpusHeader
    _bin: memoryview
    _ids: numpy.ndarray  # the same, as tokens
    _len: int

    def __len__(self) -> int:
        return self._len

    def __reduce__(self) -> tuple:
        return _open_again, (type(self), os.path.abspath(self.prefix), self.prefix, self.digest)

    @property
    def digest(self) -> str:
        """sha256 that stands for the content."""
        return self.header.digest

    @property
    def type_starts(self) -> numpy.ndarray:
        sizes = [kind.num_segments for kind in self.header.types]
        return numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int64)

    def read(self, indices: Sequence[int] | numpy.ndarray) -> list[numpy.ndarray]:
        """The tokens of several segments, in the order asked for."""
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> numpy.ndarray:
        """int64 tokens of a segment, BOS and EOS included; a copy."""
        start, stop = self.bounds(self._checked(index))
        return self._ids[start:stop].astype(numpy.int64)

    def bounds(self, index: int) -> tuple[int, int]:
        """Where a segment's tokens begin and end, in tokens from the start of the `.bin`."""
        raise NotImplementedError

    def lengths(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """int64 number of tokens of segments start to stop."""
        raise NotImplementedError

    def flags(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """uint8 flags (segments.py) of segments start to stop."""
        raise NotImplementedError

    def segments(self, start: int, stop: int) -> Segments:
        """Neighbouring segments with their flags, as a writer takes them."""
        if start >= stop:
            return Segments(*(numpy.empty(0, kind) for kind in ("uint32", "int64", "uint8")))
        tokens = self._ids[self.bounds(start)[0] : self.bounds(stop - 1)[1]]
        return Segments(
            tokens.astype(numpy.uint32), self.lengths(start, stop), self.flags(start, stop)
        )

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Neighbouring ranges of segments that fit memory, together start to stop."""
        low, stop = start, self._len if stop is None else stop
        while low < stop:
            first = self.bounds(low)[0]
            ends = range(low + 1, min(low + STEP, stop) + 1)
            fit = bisect_right(ends, TOKENS, key=lambda end: self.bounds(end - 1)[1] - first)
            high = low + max(1, fit)
            yield low, high
            self._let_go(first, self.bounds(high - 1)[1])
            low = high

    def ranges(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Like `steps`, where only lengths and flags are looked at."""
        stop = self._len if stop is None else stop
        return ((low, min(low + STEP, stop)) for low in range(start, stop, STEP))

    def token_bytes(self, start: int, stop: int) -> memoryview:
        """The tokens of neighbouring segments as they lie in the `.bin`."""
        size = self._ids.itemsize
        return self._bin[self.bounds(start)[0] * size : self.bounds(stop - 1)[1] * size]

    def documents(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """(first, last + 1) segment of each document that begins from `start` and before `stop`."""
        stop = self._len if stop is None else stop
        open_begins: list[int] = []
        for low, high in self.ranges(start, stop):
            flags = self.flags(low, high)
            begins = open_begins + (numpy.flatnonzero(flags & BEGINS) + low).tolist()
            ends = (numpy.flatnonzero(flags & ENDS) + low + 1).tolist()
            if ends and (not begins or ends[0] <= begins[0]):
                del ends[0]  # of a document that began before `start`
            yield from zip(begins, ends)
            open_begins = begins[len(ends) :]
        for begin in open_begins:
            yield begin, self._end_of_document(stop)

    def document_tokens(self, first: int, last: int) -> numpy.ndarray:
        """int64 tokens of segments first to last (not in it), without our BOS and EOS."""
        start, stop = self.bounds(first)[0], self.bounds(last - 1)[1]
        start += bool(self.flags(first, first + 1)[0] & HAS_BOS)
        stop -= bool(self.flags(last - 1, last)[0] & HAS_EOS)
        return self._ids[start:stop].astype(numpy.int64)

    def _let_go(self, start: int, stop: int) -> None:
        """Pages that were walked over count as this process's memory until it drops them."""
        mapped = self._bin.obj
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            low, high = start * self._ids.itemsize, stop * self._ids.itemsize
            low -= low % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, low, high - low)

    def _end_of_document(self, index: int) -> int:
        while index < self._len and not self.flags(index - 1, index)[0] & ENDS:
            index += 1
        return index

    def _checked(self, index: int) -> int:
        place = index + self._len if index < 0 else index
        if not 0 <= place < self._len:
            raise IndexError(f"segment {index} of {self._len} in {self.prefix}")
        return place


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped for reading; the map lives as long as what looks at it.

    Raises:
        DataError: there is no such file.
    """
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # cannot be mapped
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise DataError(_missing(path)) from None


def _missing(path: Path) -> str:
    part = Path(f"{path}.part")
    if part.exists() or Path(f"{path.with_suffix('')}.bin.part").exists():
        return (
            f"{path} is missing, but parts of a corpus lie there: it was left half written. Run"
            " the same `corpus.py write` command again; it goes on where it was."
        )
    return (
        f"{path} is missing; a corpus has the files PREFIX.bin and PREFIX.idx. Give the path"
        " without the ending, or write the corpus first (`corpus.py write`)."
    )


def _open_again(kind: type, path: str, prefix: str, digest: str) -> MappedSegments:
    corpus = kind(path)
    if corpus.digest != digest:
        raise DataError(
            f"{path} is another corpus than when this process was given it: it was written anew"
            " meanwhile. Start the run again."
        )
    corpus.prefix = prefix
    return corpus
