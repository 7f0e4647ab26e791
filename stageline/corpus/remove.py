"""Writes a corpus without some of its segments, for a run that must not see them again."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus
from stageline.corpus.header import CorpusHeader
from stageline.corpus.merge import refuse_own_input
from stageline.corpus.segments import BEGINS, ENDS, Segments
from stageline.corpus.writer import CorpusWriter
from stageline.errors import UserError


def remove(
    prefix: str | Path,
    new_prefix: str | Path,
    indices: Sequence[int] | numpy.ndarray,
    *,
    overwrite: bool = False,
) -> CorpusHeader:
    """Writes exactly the segments whose index is not in `indices`, in their order.

    What is left of a document on either side of a hole becomes a document of its own: its first
    segment begins it and its last one ends it. BOS and EOS stay where they were.

    Args:
        indices: segments of `prefix`, in any order; one that comes twice counts once.

    Returns:
        The header of the new corpus.

    Raises:
        UserError: an index outside the corpus, or the output is the input.
    """
    refuse_own_input([prefix], new_prefix)
    corpus = Corpus(prefix)
    gone = _checked(indices, corpus)
    header = corpus.header
    writer = CorpusWriter(
        new_prefix,
        tokenizer=corpus.tokenizer,
        rules=header.rules,
        language=header.language,
        type_names=[kind.name for kind in header.types],
        overwrite=overwrite,
        sources=header.sources,
        mixed_rules=header.mixed_rules,
    )
    starts = corpus.type_starts.tolist()
    with writer:
        for kind, (start, stop) in enumerate(zip(starts, starts[1:])):
            for low, high in corpus.steps(start, stop):
                writer.add(_kept(corpus, low, high, gone), type_index=kind)
        return writer.close()


def _checked(indices: Sequence[int] | numpy.ndarray, corpus: Corpus) -> numpy.ndarray:
    array = numpy.asarray(indices)
    if array.size and array.dtype.kind not in "iu":
        raise UserError(
            f"Indices to remove of dtype {array.dtype}; whole numbers were expected, the segments"
            f" of {corpus.prefix}. Use the file that `corpus.py find-trained` writes."
        )
    gone = numpy.unique(array.astype(numpy.int64))
    wrong = gone[(gone < 0) | (gone >= len(corpus))]
    if wrong.size:
        raise UserError(
            f"Segment {wrong[0]} is to be removed ({wrong.size:,} such); {corpus.prefix} has"
            f" segments 0 to {len(corpus) - 1}: the indices are another corpus's. Find them again"
            " on this one."
        )
    return gone


def _kept(corpus: Corpus, low: int, high: int, gone: numpy.ndarray) -> Segments:
    """Segments low to high that stay, their documents mended."""
    here = corpus.segments(low, high)
    # one neighbour more on either side: a hole there ends or begins a document here
    stays = numpy.ones(high - low + 2, dtype=bool)
    first, last = numpy.searchsorted(gone, [low - 1, high + 1])
    stays[gone[first:last] - (low - 1)] = False
    flags = here.flags | (BEGINS * ~stays[:-2]).astype(numpy.uint8)
    flags |= (ENDS * ~stays[2:]).astype(numpy.uint8)
    stay = stays[1:-1]
    return Segments(here.tokens[numpy.repeat(stay, here.lengths)], here.lengths[stay], flags[stay])
