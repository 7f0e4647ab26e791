"""Checks a whole corpus: every checksum, and all that must hold of its segments."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus, MappedSegments, open_corpus
from stageline.corpus.header import (
    BEGINS,
    ENDS,
    HAS_BOS,
    HAS_EOS,
    CorpusHeader,
    SegmentType,
    TokenizerInfo,
    path_of,
)
from stageline.corpus.writer import CHUNK, ENDINGS, count_endings, read_chunks
from stageline.errors import DataError


def verify(prefix: str | Path, tokenizer_fingerprint: str | None = None) -> CorpusHeader:
    """Reads all of a corpus.

    Args:
        tokenizer_fingerprint: of the tokenizer that it is to be used with.

    Returns:
        The header, when everything holds.

    Raises:
        DataError: what does not hold, all of it in one message.
    """
    corpus = Corpus(prefix)
    if tokenizer_fingerprint is not None:
        check_tokenizer(corpus.tokenizer, tokenizer_fingerprint, prefix=corpus.prefix)
    problems = [*_wrong_checksums(corpus), *_wrong_offsets(corpus)]
    if not problems:  # else the walk would stumble over what is named already
        problems = [*_wrong_segments(corpus), *_wrong_types(corpus), *_wrong_counts(corpus)]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise DataError(
            f"{corpus.prefix} is damaged; these things were expected to hold and do not:{listed}\n"
            "Copy the corpus again, or write it anew."
        )
    return corpus.header


def check_tokenizer(own: TokenizerInfo, fingerprint: str, *, prefix: str) -> None:
    """The tokenizer that is to be used is the one that wrote a corpus.

    Raises:
        DataError: it is another one.
    """
    if own.fingerprint != fingerprint:
        raise DataError(
            f"{prefix} was written with tokenizer {own.name!r} (fingerprint"
            f" {own.fingerprint[:12]}); the one given has fingerprint {fingerprint[:12]}: the ids"
            " would mean other text. Give the tokenizer it was written with, or write it anew."
        )


def _wrong_checksums(corpus: Corpus) -> list[str]:
    whole = hashlib.sha256()
    for chunk in read_chunks(path_of(corpus.prefix, ".bin")):
        whole.update(chunk)
    wrong = []
    if whole.hexdigest() != corpus.header.bin_sha256:
        wrong.append("the .bin has other bytes than were written (sha256)")
    both = "".join(_sha256(array) for array in corpus.arrays())
    if hashlib.sha256(both.encode()).hexdigest() != corpus.header.arrays_sha256:
        wrong.append("the offsets or flags of the .idx are not those that were written (sha256)")
    return wrong


def _sha256(data: memoryview) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(data), CHUNK):
        digest.update(data[start : start + CHUNK])
    return digest.hexdigest()


def _wrong_offsets(corpus: Corpus) -> list[str]:
    limit = corpus.header.rules.seq_length
    for low, high in corpus.ranges():
        lengths = corpus.lengths(low, high)
        wrong = numpy.flatnonzero((lengths <= 0) | (lengths > limit))
        if wrong.size:
            return [f"segment {low + wrong[0]} has 1 to {limit} tokens; it has {lengths[wrong[0]]}"]
    ends = corpus.offsets(0, len(corpus))[[0, -1]].tolist()
    expected = [0, corpus.header.num_tokens]
    return [f"offsets go from {expected[0]} to {expected[1]}; they go {ends}"] * (ends != expected)


def _wrong_segments(corpus: Corpus) -> list[str]:
    info, wrong = corpus.tokenizer, []
    for low, high in corpus.steps():
        here = corpus.segments(low, high)
        ends = numpy.cumsum(here.lengths)
        firsts, lasts = here.tokens[ends - here.lengths], here.tokens[ends - 1]
        too_large = numpy.flatnonzero(here.tokens >= info.vocab_size)
        if too_large.size:
            segment = low + int(numpy.searchsorted(ends, too_large[0], side="right"))
            wrong.append(
                f"ids are below {info.vocab_size}; segment {segment} has"
                f" {here.tokens[too_large[0]]}"
            )
        for what, flag, tokens, token in (
            ("begins with BOS", HAS_BOS, firsts, info.bos_id),
            ("ends with EOS", HAS_EOS, lasts, info.eos_id),
        ):
            odd = numpy.flatnonzero(((here.flags & flag) != 0) & (tokens != _id(token)))
            if odd.size:
                wrong.append(f"segment {low + odd[0]} {what}, as its flags say")
        if wrong:
            break
    return wrong


def _wrong_types(corpus: Corpus) -> list[str]:
    starts, wrong = corpus.type_starts.tolist(), []
    for kind, start, stop in zip(corpus.header.types, starts, starts[1:]):
        num_documents, ended = 0, True
        for low, high in corpus.ranges(start, stop):
            flags = corpus.flags(low, high)
            begins, ends = (flags & BEGINS) != 0, (flags & ENDS) != 0
            num_documents += int(numpy.count_nonzero(begins))
            odd = numpy.flatnonzero(begins != numpy.concatenate([[ended], ends[:-1]]))
            if odd.size:
                wrong.append(f"segment {low + odd[0]} begins a document where the one before ends")
                break
            ended = bool(ends[-1])
        if not ended:
            wrong.append(f"the last document of type {kind.id} ends")
        num_tokens = int(numpy.diff(corpus.offsets(start, stop)[[0, -1]].astype(numpy.int64))[0])
        found = {"documents": num_documents, "tokens": num_tokens}
        said = {"documents": kind.num_documents, "tokens": kind.num_tokens}
        wrong += [
            f"type {kind.id} has {said[what]} {what}; it has {found[what]}"
            for what in said
            if said[what] != found[what]
        ]
    return wrong


def _wrong_counts(corpus: Corpus) -> list[str]:
    """The two small files agree with the index; they may be missing."""
    endings = numpy.zeros(4, dtype=numpy.int64)
    for low, high in corpus.ranges():
        endings += count_endings(corpus.flags(low, high))
    kinds = [kind.num_segments for kind in corpus.header.types]
    expected = {".dis": ("counts", kinds), ".tmp": (None, dict(zip(ENDINGS, endings.tolist())))}
    wrong = []
    for suffix, (name, value) in expected.items():
        path = path_of(corpus.prefix, suffix)
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found[name] if name else found
        except (ValueError, KeyError, TypeError):
            found = "something else"
        if found != value:
            wrong.append(f"the {suffix} says {value}; it says {found}")
    return wrong


def _id(token: int | None) -> int:
    return -1 if token is None else token


# -- figures of a corpus: lengths of segments, tokens of each type, what rows cost in padding -----


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
