"""What a worker does with a chunk: rows to documents, documents to segments. Holds no state."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from stageline.chaos import point
from stageline.corpus.chunks import CHUNK_BYTES, Chunk, iter_chunks
from stageline.corpus.row_text import BadLine, Document, Rows, read_chunk
from stageline.corpus.segments import CutRules, Segments, TokenizerInfo
from stageline.corpus.sources import Source
from stageline.errors import UserError

_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 200_000


@dataclass(frozen=True)
class Task:
    """What all workers are given; it can be pickled.

    Attributes:
        make_cutter: makes what turns texts into (Segments, counts); called once in each worker.
        columns: of Parquet files that documents are made of; None: all.
    """

    sources: Sequence[Source]
    make_cutter: Callable[[], Any]
    document: Document | None
    max_document_bytes: int
    columns: Sequence[str] | None = None
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class CutterFacts:
    """What the workers cut with.

    Attributes:
        encoder: which implementation of the tokenizer is used, for people.
    """

    tokenizer: TokenizerInfo
    rules: CutRules
    encoder: str


@dataclass
class ChunkResult:
    """What became of a chunk.

    Attributes:
        counts: those of the cutter, by name.
        bad: the first bad lines, counted from 1 in the chunk.
        bad_kinds: how many of which kind.
    """

    segments: Segments
    counts: dict[str, int]
    num_lines: int
    bad: list[BadLine] = field(default_factory=list)
    bad_kinds: Counter[str] = field(default_factory=Counter)


class Worker:
    """Cuts chunks; the same chunk gives the same bytes in every process.

    Raises:
        UserError: the cutter cannot be made.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._cutter = task.make_cutter()
        check = getattr(getattr(self._cutter, "encoder", None), "check", None)
        if check is not None:
            # all workers look at the same documents, so all come to the same encoder
            check(sample_texts(task))

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        encoder = self._cutter.encoder
        note = getattr(encoder, "note", "")
        kind = f"{encoder.kind} ({note})" if note else str(encoder.kind)
        return CutterFacts(encoder.info, self._cutter.rules, kind)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        task = self._task
        rows = read_chunk(chunk, document=task.document, max_document_bytes=task.max_document_bytes)
        point("corpus_worker")
        segments, counts = self._cut(rows)
        bad = sorted(rows.bad, key=lambda item: item.line)
        return ChunkResult(segments, counts, rows.num_lines, bad, rows.bad_kinds)

    def _cut(self, rows: Rows) -> tuple[Segments, dict[str, int]]:
        try:
            segments, counts = self._cutter(rows.texts)
            return segments, _as_dict(counts)
        except UserError:
            return self._cut_one_by_one(rows)

    def _cut_one_by_one(self, rows: Rows) -> tuple[Segments, dict[str, int]]:
        """Finds the document that the cutter refuses, and leaves it out."""
        parts, total = [_no_segments()], Counter[str]()
        for number, text in zip(rows.numbers, rows.texts, strict=True):
            try:
                segments, counts = self._cutter([text])
            except UserError as error:
                rows.refuse(number, "refused", str(error), text)
                continue
            parts.append(segments)
            total.update(_as_dict(counts))
        return join(parts), dict(total)


def sample_texts(task: Task) -> list[str]:
    """Some documents from the beginning of the input."""
    chunks = iter_chunks(
        task.sources,
        max_document_bytes=task.max_document_bytes,
        columns=task.columns,
        chunk_bytes=task.chunk_bytes,
    )
    texts: list[str] = []
    for chunk in chunks:
        rows = read_chunk(chunk, document=task.document, max_document_bytes=task.max_document_bytes)
        texts += rows.texts[:_SAMPLE_DOCUMENTS]
        if texts:
            break
    while len(texts) > 1 and sum(map(len, texts)) > _SAMPLE_CHARACTERS:
        texts.pop()
    return [text[:_SAMPLE_CHARACTERS] for text in texts]


def join(parts: Sequence[Segments]) -> Segments:
    """One behind the other."""
    return Segments(
        *(
            numpy.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "lengths", "flags")
        )
    )


def _no_segments() -> Segments:
    return Segments(
        numpy.zeros(0, numpy.uint32), numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.uint8)
    )


def _as_dict(counts: Any) -> dict[str, int]:
    return {name: int(value) for name, value in dataclasses.asdict(counts).items()}
