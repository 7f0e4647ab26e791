"""Takes a corpus to Megatron-core's files and back."""

from collections.abc import Iterator
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus
from stageline.corpus.header import CorpusHeader, path_of
from stageline.corpus.megatron import MegatronCorpus, write_megatron
from stageline.corpus.merge import refuse_own_input
from stageline.corpus.segments import (
    BEGINS,
    ENDS,
    HAS_BOS,
    HAS_EOS,
    CutRules,
    Segments,
    TokenizerInfo,
)
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError


def to_megatron(
    prefix: str | Path, new_prefix: str | Path, *, overwrite: bool = False
) -> list[Path]:
    """Writes a corpus as files of Megatron-core: a segment a sequence, documents as they are.

    Returns:
        The prefixes written: `new_prefix`, or one a type (NEW_PREFIX_0, ...) for several types,
        as Megatron-core mixes prefixes and knows no types within one.

    Raises:
        UserError: there are such files already, and no `overwrite`.
    """
    corpus = Corpus(prefix)
    starts = corpus.type_starts.tolist()
    several = len(starts) > 2
    targets = [
        path_of(new_prefix, f"_{kind}" if several else "") for kind in range(len(starts) - 1)
    ]
    for target in targets:
        refuse_own_input([prefix], target)
        if path_of(target, ".idx").exists() and not overwrite:
            raise UserError(
                f"{path_of(target, '.idx')} exists: it is not overwritten unasked. Give another"
                " prefix, or --overwrite to replace it."
            )
    for target, start, stop in zip(targets, starts, starts[1:]):
        write_megatron(corpus, target, start=start, stop=stop)
    return targets


def from_megatron(
    prefix: str | Path,
    new_prefix: str | Path,
    *,
    tokenizer: TokenizerInfo,
    seq_length: int | None = None,
    language: str = "unknown",
    overwrite: bool = False,
) -> CorpusHeader:
    """Writes a Megatron-core pair as a corpus: a sequence a segment, documents as they are.

    Args:
        tokenizer: what made the ids; Megatron-core's files do not say.
        seq_length: longer sequences are cut into the fewest pieces of nearly equal length; None:
            as long as the longest one is.

    Returns:
        The header. A first id that is the tokenizer's BOS, and a last that is its EOS, are taken
        for put there.

    Raises:
        DataError: an id that the tokenizer does not have.
    """
    refuse_own_input([prefix], new_prefix)
    pair = MegatronCorpus(prefix)
    limit = seq_length or max(pair.header.rules.seq_length, 1)
    writer = CorpusWriter(
        new_prefix,
        tokenizer=tokenizer,
        rules=CutRules(limit, splits_sentences=False),
        language=language,
        overwrite=overwrite,
        sources=[f"{prefix} (megatron-core)"],
    )
    with writer:
        for low, high in pair.steps():
            writer.add(_segments(pair, low, high, tokenizer, limit))
        return writer.close()


def _segments(
    pair: MegatronCorpus, low: int, high: int, tokenizer: TokenizerInfo, limit: int
) -> Segments:
    rows = pair.read(range(low, high))
    flags, lengths = pair.flags(low, high), pair.lengths(low, high)
    tokens = numpy.concatenate(rows)
    wrong = tokens[(tokens < 0) | (tokens >= 1 << 32)]
    if wrong.size:
        raise DataError(
            f"{pair.prefix}.bin holds {wrong[0]}; ids are 0 or more and below 2^32: the file does"
            " not hold tokens. Give the prefix of a tokenised text."
        )
    _check_empty(pair, low, lengths, flags)
    firsts = numpy.array([row[0] if len(row) else -1 for row in rows])
    lasts = numpy.array([row[-1] if len(row) else -1 for row in rows])
    flags = flags | _where(flags & BEGINS, firsts == _id(tokenizer.bos_id), HAS_BOS)
    flags |= _where(flags & ENDS, lasts == _id(tokenizer.eos_id), HAS_EOS)
    return _cut(tokens.astype(numpy.uint32), lengths, flags, limit)


def _check_empty(
    pair: MegatronCorpus, low: int, lengths: numpy.ndarray, flags: numpy.ndarray
) -> None:
    # an empty document vanishes, but an empty end of one would take the border along
    is_end = (flags != 0) & (flags != BEGINS | ENDS)
    wrong = numpy.flatnonzero((lengths == 0) & is_end)
    if wrong.size:
        raise DataError(
            f"Sequence {low + wrong[0]} of {pair.prefix} is empty and begins or ends a document of"
            " several: that border would be lost. Write the pair again without empty sequences."
        )


def _cut(
    tokens: numpy.ndarray, lengths: numpy.ndarray, flags: numpy.ndarray, limit: int
) -> Segments:
    counts = -(-lengths // limit)
    cut_lengths = numpy.fromiter(_near_equal(lengths, counts), dtype=numpy.int64)
    cut_flags = numpy.zeros(len(cut_lengths), dtype=numpy.uint8)
    some = counts > 0
    ends = numpy.cumsum(counts)[some] - 1
    begins = ends - counts[some] + 1
    cut_flags[begins] |= flags[some] & (BEGINS | HAS_BOS)
    cut_flags[ends] |= flags[some] & (ENDS | HAS_EOS)
    return Segments(tokens, cut_lengths, cut_flags)


def _near_equal(lengths: numpy.ndarray, counts: numpy.ndarray) -> Iterator[int]:
    for length, count in zip(lengths.tolist(), counts.tolist()):
        for piece in range(count):
            yield length // count + (piece < length % count)


def _id(token: int | None) -> int:
    return -2 if token is None else token  # -1 stands for an empty row


def _where(one: numpy.ndarray, other: numpy.ndarray, flag: int) -> numpy.ndarray:
    return (((one != 0) & other) * flag).astype(numpy.uint8)
