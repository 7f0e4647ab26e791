"""The header of a corpus, which its `.idx` has before the offsets.

A corpus PREFIX is four files:
    .bin  the tokens, little-endian, uint16 (vocabularies up to 65,536 ids) or uint32
    .idx  preamble (24 bytes), JSON, zeros up to a page; then uint64 offsets[n + 1], counted in
          tokens, and uint8 flags[n]
    .dis  JSON: how many segments each type has
    .tmp  JSON: how many segments have BOS only, EOS only, neither, both
The segments of a type are one range. Knows bytes, not how they are read or written.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

from stageline.errors import DataError

# A document is one text of the input. A segment is a stretch of its tokens, at most `seq_length`
# long with BOS and EOS counted; the segments of a document follow each other and share no token.
# Flags of a segment: the first and the last one of its document, with the BOS or EOS of the build.
BEGINS, ENDS, HAS_BOS, HAS_EOS = 1, 2, 4, 8


@dataclass(frozen=True)
class Segments:
    """Some segments, in order."""

    tokens: numpy.ndarray  # uint32 [sum of lengths], one segment behind the other
    lengths: numpy.ndarray  # int64 [segments], all positive
    flags: numpy.ndarray  # uint8 [segments], sums of BEGINS, ENDS, HAS_BOS and HAS_EOS

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Join segments in order; no parts give no segments."""
        parts = [cls(*(numpy.empty(0, kind) for kind in ("u4", "i8", "u1"))), *parts]
        names = ("tokens", "lengths", "flags")
        return cls(*(numpy.concatenate([getattr(one, name) for one in parts]) for name in names))


@dataclass(frozen=True)
class TokenizerInfo:
    """Description of the tokenizer of a corpus."""

    name: str  # the folder's, for people
    fingerprint: str  # sha256 of all that decides which ids a text gets
    vocab_size: int  # ids are below it
    bos_id: int | None  # None where the tokenizer has none
    eos_id: int | None
    folder: str = ""  # when the corpus was written; "" if unknown


@dataclass(frozen=True)
class CutRules:
    """Rules by which documents become segments."""

    seq_length: int  # tokens of a segment at most, with BOS and EOS
    # each segment takes as many sentences as fit; earlier releases had `even`: of near-equal length
    pieces: str = "greedy"
    splits_sentences: bool = True  # else a cut may be between any two tokens
    keeps_newlines: bool = True  # else a run of white space with a newline becomes one space
    # at the first segment of a document, and at the last; None: where the tokenizer has the token
    adds_bos: bool | None = True
    adds_eos: bool | None = True


Header = TypeVar("Header")
MAGIC = b"STAGLIDX"
VERSION = 1
PAGE = 4096
EDGE_BYTES = 64 * 1024
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
# magic, version, bytes of the JSON, its crc32, 4 bytes of zeros
_PREAMBLE = struct.Struct("<8sIII4x")


@dataclass(frozen=True)
class SegmentType:
    """One source type: its segments are one range, types in the order of their ids."""

    id: int
    name: str
    num_segments: int
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class CorpusHeader:
    """All that describes a corpus."""

    dtype: str  # `uint16` or `uint32`
    tokenizer: TokenizerInfo | None  # None for files of Megatron-core
    rules: CutRules  # a merged corpus has those of its first input
    language: str
    types: tuple[SegmentType, ...]
    bin_size: int
    bin_sha256: str
    edges_sha256: str  # hash of the size and both ends of the `.bin`, checked at each open
    arrays_sha256: str  # hash of offsets and flags
    sources: tuple = ()  # where the text is from, for people
    version: int = VERSION

    @property
    def num_segments(self) -> int:
        return sum(kind.num_segments for kind in self.types)

    @property
    def num_tokens(self) -> int:
        return sum(kind.num_tokens for kind in self.types)

    @property
    def num_documents(self) -> int:
        return sum(kind.num_documents for kind in self.types)

    @property
    def digest(self) -> str:
        """sha256 of the content: equal for equal segments, whatever prefix and sources."""
        kinds = [(kind.num_segments, kind.num_tokens) for kind in self.types]
        fingerprint = self.tokenizer.fingerprint if self.tokenizer else None
        content = [self.dtype, fingerprint, kinds, self.bin_sha256, self.arrays_sha256]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def path_of(prefix: str | Path, suffix: str) -> Path:
    """Return the file of a corpus; a prefix may hold dots."""
    return Path(f"{os.fspath(prefix)}{suffix}")


def dtype_for(vocab_size: int) -> str:
    """Return the narrowest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def framed(magic: bytes, version: int, text: str) -> bytes:
    """Return preamble and JSON, padded with zeros so that the arrays begin on a page."""
    data = text.encode()
    whole = _PREAMBLE.pack(magic, version, len(data), zlib.crc32(data)) + data
    return whole + bytes(-len(whole) % PAGE)


def unframed(
    start: bytes | memoryview, path: Path, magic: bytes, version: int, make: Callable[[Any], Header]
) -> tuple[Header, int]:
    """Return what `make` makes of the JSON of `framed`, and where the arrays begin.

    Raises:
        DataError: another kind of file, of a newer version than `version`, or damaged.
    """
    if bytes(start[: len(MEGATRON_MAGIC)]) == MEGATRON_MAGIC:
        raise DataError(f"{path} is an index of Megatron-core; convert it first (corpus convert).")
    if bytes(start[: len(magic)]) != magic:
        raise DataError(
            f"{path} is of another program: it begins with {bytes(start[: len(magic)])!r}. Give "
            "the prefix of a corpus that `corpus.py write` made."
        )
    if len(start) < _PREAMBLE.size:
        raise damaged(path, f"it ends after {len(start)} bytes")
    _, found, size, crc = _PREAMBLE.unpack_from(start)
    if found > version:
        raise DataError(
            f"{path} has format version {found}; this program reads versions up to {version}. "
            "Update Stageline."
        )
    end = _PREAMBLE.size + size
    text = bytes(start[_PREAMBLE.size : end])
    if found < 1 or len(text) != size or zlib.crc32(text) != crc:
        raise damaged(path, "its checksum does not fit the header")
    try:
        return make(json.loads(text)), end + -end % PAGE
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise damaged(path, f"its header lacks what this version has ({problem})") from error


def damaged(path: Path, problem: str) -> DataError:
    """Return the error for a file of a corpus that another program cut or changed."""
    return DataError(f"{path} is damaged: {problem}. Copy it again, or write the corpus again.")


def encode_header(header: CorpusHeader) -> bytes:
    """Return the first bytes of the `.idx`."""
    return framed(MAGIC, header.version, json.dumps(asdict(header), ensure_ascii=False, indent=1))


def decode_header(start: bytes | memoryview, path: Path) -> tuple[CorpusHeader, int]:
    """Return the header of an `.idx` and the first byte of its arrays; raises as `unframed`."""

    def make(values: dict[str, Any]) -> CorpusHeader:
        tokenizer = values.pop("tokenizer")
        return CorpusHeader(
            tokenizer=TokenizerInfo(**tokenizer) if tokenizer else None,
            rules=CutRules(**values.pop("rules")),
            types=tuple(SegmentType(**kind) for kind in values.pop("types")),
            sources=tuple(values.pop("sources")),
            **values,
        )

    return unframed(start, path, MAGIC, VERSION, make)


def edges_digest(path: Path) -> str:
    """Hash a file's size, its first and its last 64 KiB, to find a swapped file in O(1)."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        digest.update(file.read(EDGE_BYTES))
        file.seek(max(0, size - EDGE_BYTES))
        digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()
