"""Small corpora for tests: documents of random ids, and what they become on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus
from stageline.corpus.header import (
    BEGINS,
    ENDS,
    HAS_BOS,
    HAS_EOS,
    CutRules,
    Segments,
    TokenizerInfo,
)
from stageline.corpus.writer import CorpusWriter

RULES = CutRules(seq_length=8)
Document = list[list[int]]


def tokenizer(vocab_size: int = 1000, **changes) -> TokenizerInfo:
    """Return the facts of an invented tokenizer, with BOS 1 and EOS 2."""
    values = dict(name="tiny", fingerprint="f" * 64, vocab_size=vocab_size, bos_id=1, eos_id=2)
    return TokenizerInfo(**{**values, **changes})


def documents_of(
    sizes: Sequence[int], *, seed: int = 0, vocab_size: int = 1000, limit: int = 8
) -> list[Document]:
    """Return documents of `sizes` random ids (without BOS and EOS), cut every `limit` tokens."""
    random = numpy.random.default_rng(seed)
    whole = [[1, *random.integers(3, vocab_size, size).tolist(), 2] for size in sizes]
    return [[doc[i : i + limit] for i in range(0, len(doc), limit)] for doc in whole]


def segments_of(documents: Sequence[Document]) -> Segments:
    """Return documents as a cutter hands them on."""
    pieces, flags = [], []
    for document in documents:
        for number, piece in enumerate(document):
            is_last = number == len(document) - 1
            pieces.append(piece)
            flags.append((number == 0) * (BEGINS | HAS_BOS) + is_last * (ENDS | HAS_EOS))
    return Segments(
        numpy.array([token for piece in pieces for token in piece], dtype=numpy.uint32),
        numpy.array([len(piece) for piece in pieces], dtype=numpy.int64),
        numpy.array(flags, dtype=numpy.uint8),
    )


def write(
    prefix: str | Path,
    documents: Sequence[Document],
    *,
    vocab_size: int = 1000,
    batch: int = 3,
    **settings,
) -> Corpus:
    """Write a corpus of one type, a few documents at a time."""
    base = {"tokenizer": tokenizer(vocab_size), "rules": RULES, "language": "en"}
    writer = CorpusWriter(prefix, **{**base, **settings})
    for start in range(0, len(documents), batch):
        writer.add(segments_of(documents[start : start + batch]))
    writer.close()
    return Corpus(prefix)
