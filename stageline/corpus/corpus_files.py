"""Opens a corpus and reads its segments in place.

Opening costs the same for any size: the header, and both ends of the `.bin`, which finds a
truncated or swapped file. Damage in the middle is found by `verify`.
"""

import os
from pathlib import Path

import numpy

from stageline.corpus.header import (
    MEGATRON_MAGIC,
    CorpusHeader,
    decode_header,
    edges_digest,
    path_of,
)
from stageline.corpus.mapped import MappedSegments, map_file
from stageline.corpus.megatron import MegatronCorpus
from stageline.corpus.segments import TokenizerInfo
from stageline.errors import DataError


class Corpus(MappedSegments):
    """A corpus that `CorpusWriter` wrote.

    Raises:
        DataError: a file is missing, truncated, swapped, foreign, damaged or of a newer version.
    """

    def __init__(self, path_prefix: str | Path) -> None:
        self.prefix = os.fspath(path_prefix)
        index_path = path_of(self.prefix, ".idx")
        index = map_file(index_path)
        self.header, arrays = decode_header(index, index_path)
        self._len = self.header.num_segments
        _check_index(index_path, len(index), arrays + 8 * (self._len + 1) + self._len)
        flags = arrays + 8 * (self._len + 1)
        self._offsets = index[arrays:flags].cast("Q")
        self._flags = index[flags:]
        _check_offsets(index_path, self._offsets, self.header)
        self._bin = map_file(path_of(self.prefix, ".bin"))
        _check_tokens(path_of(self.prefix, ".bin"), self.header)
        # a plain array over the map: its slices cost half of numpy.memmap's
        dtype = numpy.dtype(self.header.dtype).newbyteorder("<")
        self._ids = numpy.frombuffer(self._bin, dtype=dtype)

    def __getitem__(self, index: int) -> numpy.ndarray:
        """int64 tokens of a segment, BOS and EOS included; a copy."""
        if index < 0 or index >= self._len:
            index = self._checked(index)
        return self._ids[self._offsets[index] : self._offsets[index + 1]].astype(numpy.int64)

    @property
    def tokenizer(self) -> TokenizerInfo:
        """What wrote it; a corpus of ours always says."""
        assert self.header.tokenizer is not None
        return self.header.tokenizer

    def bounds(self, index: int) -> tuple[int, int]:
        """Where a segment's tokens begin and end, in tokens from the start of the `.bin`."""
        return self._offsets[index], self._offsets[index + 1]

    def lengths(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """int64 number of tokens of segments start to stop."""
        stop = self._len if stop is None else stop
        return numpy.diff(self.offsets(start, stop)).astype(numpy.int64)

    def flags(self, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """uint8 flags (segments.py) of segments start to stop; a view of the file."""
        stop = self._len if stop is None else stop
        return numpy.frombuffer(self._flags, dtype=numpy.uint8)[start:stop]

    def offsets(self, start: int, stop: int) -> numpy.ndarray:
        """uint64 offsets of segments start to stop, and the end of the last; a view of the file."""
        return numpy.frombuffer(self._offsets, dtype="<u8")[start : stop + 1]

    def arrays(self) -> tuple[memoryview, memoryview]:
        """Offsets and flags as they lie in the file, in bytes."""
        return self._offsets.cast("B"), self._flags


def open_corpus(path_prefix: str | Path) -> MappedSegments:
    """A corpus of ours or a pair of Megatron-core, by what the `.idx` begins with.

    Raises:
        DataError: neither, or damaged.
    """
    start = map_file(path_of(path_prefix, ".idx"))[: len(MEGATRON_MAGIC)]
    return (MegatronCorpus if start == MEGATRON_MAGIC else Corpus)(path_prefix)


def _check_index(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise DataError(
            f"{path} has {found:,} bytes; its header announces {expected:,}: the file was cut or"
            " added to. Copy it again, or write the corpus anew."
        )


def _check_offsets(path: Path, offsets: memoryview, header: CorpusHeader) -> None:
    if (offsets[0], offsets[-1]) != (0, header.num_tokens):
        raise DataError(
            f"The offsets of {path} go from {offsets[0]:,} to {offsets[-1]:,}; its header says from"
            f" 0 to {header.num_tokens:,}: the file is damaged. Copy it again."
        )


def _check_tokens(path: Path, header: CorpusHeader) -> None:
    found = path.stat().st_size
    if found != header.bin_size:
        raise DataError(
            f"{path} has {found:,} bytes; its index was written for {header.bin_size:,}: the file"
            " was truncated, or the .idx is another corpus's. Copy both files again."
        )
    if edges_digest(path) != header.edges_sha256:
        raise DataError(
            f"{path} has the {found:,} bytes that its index was written for, but others: the .bin"
            " or the .idx was swapped with another corpus's. Copy both files again."
        )
