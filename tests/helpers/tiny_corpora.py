"""Small pre-training corpora made here: documents of known tokens, in one or several types."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from stageline.corpus.header import CutRules
from stageline.corpus.writer import CorpusWriter
from tests.helpers.corpora import Document, segments_of, tokenizer

BOS, EOS, FIRST_ID = 1, 2, 5


def documents(
    lengths: Sequence[Sequence[int]], *, vocab_size: int = 64, seed: int = 0
) -> list[Document]:
    """Return documents of segments of these lengths, the first with BOS and the last with EOS."""
    draw = numpy.random.default_rng(seed)
    made = []
    for of_document in lengths:
        document = [draw.integers(FIRST_ID, vocab_size, length).tolist() for length in of_document]
        document[0][0], document[-1][-1] = BOS, EOS
        made.append(document)
    return made


def tiny_corpus(
    prefix: Path,
    types: Sequence[Sequence[Document]],
    *,
    seq_length: int = 16,
    vocab_size: int = 64,
    fingerprint: str = "",
) -> Path:
    """Writes the documents of each type as a corpus; no run compares an empty fingerprint."""
    writer = CorpusWriter(
        prefix,
        tokenizer=tokenizer(vocab_size, fingerprint=fingerprint),
        rules=CutRules(seq_length),
        language="english",
        type_names=[f"type{kind}" for kind in range(len(types))],
    )
    for kind, of_type in enumerate(types):
        for document in of_type:
            writer.add(segments_of([document]), type_index=kind)
    writer.close()
    return prefix
