"""What is done with finished corpora: merging, removing segments, Megatron-core's files, checking.

Streams: memory does not grow with the inputs.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus, MegatronCorpus, write_megatron
from stageline.corpus.header import (
    BEGINS,
    ENDS,
    HAS_BOS,
    HAS_EOS,
    CorpusHeader,
    CutRules,
    Segments,
    TokenizerInfo,
    path_of,
)
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError

# (corpus, index of its type)
_Piece = tuple[Corpus, int]


def merge(
    prefixes: Sequence[str | Path],
    types: Sequence[int],
    new_prefix: str | Path,
    *,
    overwrite: bool = False,
) -> CorpusHeader:
    """Writes the segments of several corpora as one corpus.

    Inputs of the same type id are joined, in the order given. An input that has several types
    itself keeps them apart: its type k is joined with type k of the others of that id. The types
    of the result are numbered from 0, by id and then by type within the inputs.

    Args:
        types: an id for each prefix.

    Returns:
        The header of the new corpus.

    Raises:
        UserError: not one id a prefix, or an input that is the output.
        DataError: inputs of different tokenizers or segment lengths.
    """
    if not prefixes or len(types) != len(prefixes) or min(types) < 0:
        raise UserError(
            f"{len(prefixes)} corpora to merge and type ids {list(types)}: each corpus needs one id"
            " of 0 or more (the same id: joined into one type). Give as many ids as prefixes."
        )
    refuse_own_input(prefixes, new_prefix)
    corpora = [Corpus(prefix) for prefix in prefixes]
    headers = [corpus.header for corpus in corpora]
    for corpus in corpora[1:]:
        _check_alike(corpora[0], corpus)
    kinds: dict[tuple[int, int], list[_Piece]] = {}
    for corpus, given in zip(corpora, types, strict=True):
        for own in corpus.header.types:
            kinds.setdefault((given, own.id), []).append((corpus, own.id))
    kinds = dict(sorted(kinds.items()))
    writer = CorpusWriter(
        new_prefix,
        tokenizer=corpora[0].tokenizer,
        rules=headers[0].rules,
        language="+".join(_each_once(header.language for header in headers)),
        type_names=_names(kinds.values()),
        overwrite=overwrite,
        sources=_each_once(source for header in headers for source in header.sources),
    )
    with writer:
        for index, pieces in enumerate(kinds.values()):
            for corpus, kind in pieces:
                start, stop = corpus.type_starts[kind : kind + 2].tolist()
                for low, high in corpus.steps(start, stop):
                    writer.add(corpus.segments(low, high), type_index=index)
        return writer.close()


def refuse_own_input(prefixes: Sequence[str | Path], new_prefix: str | Path) -> None:
    """Refuses to overwrite what is being read.

    Raises:
        UserError: the output is one of the inputs.
    """
    target = os.path.realpath(path_of(new_prefix, ".bin"))
    for prefix in prefixes:
        if os.path.realpath(path_of(prefix, ".bin")) == target:
            raise UserError(
                f"{prefix} is read and would be written too: a corpus is not changed in place."
                " Give another prefix to write to."
            )


def _check_alike(first: Corpus, other: Corpus) -> None:
    one, two = first.tokenizer, other.tokenizer
    places = f"{first.prefix} and {other.prefix}"
    if one.fingerprint != two.fingerprint:
        raise DataError(
            f"{places} have different tokenizers ({_shown(one)} and {_shown(two)}): the same ids"
            " would mean different text. Write one of them again with the other's tokenizer."
        )
    types = first.header.dtype, other.header.dtype
    if types[0] != types[1] or one.vocab_size != two.vocab_size:
        raise DataError(
            f"{places} have different vocabularies ({one.vocab_size:,} ids in {types[0]} and"
            f" {two.vocab_size:,} in {types[1]}). Write one of them again."
        )
    limits = first.header.rules.seq_length, other.header.rules.seq_length
    if limits[0] != limits[1]:
        raise DataError(
            f"{places} have segments of at most {limits[0]} and {limits[1]} tokens (seq_length): a"
            " merged corpus has one limit. Write one of them again with the other's `seq_length`."
        )


def _shown(tokenizer: TokenizerInfo) -> str:
    return f"{tokenizer.name!r}, fingerprint {tokenizer.fingerprint[:12]}"


def _names(kinds: Iterable[list[_Piece]]) -> list[str]:
    """Names of the merged types: up to three names of what was joined."""
    names: list[str] = []
    for pieces in kinds:
        own = _each_once(corpus.header.types[kind].name for corpus, kind in pieces)
        name = "+".join(own[:3]) + (f"+{len(own) - 3}" if len(own) > 3 else "")
        names.append(name if name not in names else f"{name}:{len(names)}")
    return names


def _each_once(values: Iterable) -> list:
    kept: list = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept


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

    Raises:
        UserError: an index outside the corpus, or the output is the input.
    """
    refuse_own_input([prefix], new_prefix)
    corpus = Corpus(prefix)
    header = corpus.header
    gone = numpy.unique(numpy.asarray(indices, dtype=numpy.int64))
    wrong = gone[(gone < 0) | (gone >= len(corpus))]
    if wrong.size:
        raise UserError(
            f"Segment {wrong[0]} is to be removed ({wrong.size:,} such); {prefix} has segments 0"
            f" to {len(corpus) - 1}: the indices are another corpus's. Find them again on this one."
        )
    writer = CorpusWriter(
        new_prefix,
        tokenizer=corpus.tokenizer,
        rules=header.rules,
        language=header.language,
        type_names=[kind.name for kind in header.types],
        overwrite=overwrite,
        sources=header.sources,
    )
    starts = corpus.type_starts.tolist()
    with writer:
        for kind, (start, stop) in enumerate(zip(starts, starts[1:])):
            for low, high in corpus.steps(start, stop):
                writer.add(_kept(corpus, low, high, gone), type_index=kind)
        return writer.close()


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
    num_types = len(starts) - 1
    targets = [path_of(new_prefix, f"_{kind}" * (num_types > 1)) for kind in range(num_types)]
    for target in targets:
        refuse_own_input([prefix], target)
        if path_of(target, ".idx").exists() and not overwrite:
            raise UserError(
                f"{path_of(target, '.idx')} exists: it is not overwritten unasked. Give another"
                " prefix, or `overwrite` to replace it."
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
    rows = [pair[index] for index in range(low, high)]
    flags, lengths = pair.flags(low, high), pair.lengths(low, high)
    tokens = numpy.concatenate(rows)
    wrong = tokens[(tokens < 0) | (tokens >= 1 << 32)]
    if wrong.size:
        raise DataError(
            f"{pair.prefix}.bin holds {wrong[0]}; ids are 0 or more and below 2^32: the file does"
            " not hold tokens. Give the prefix of a tokenised text."
        )
    # an empty document vanishes, but an empty end of one would take the border along
    is_end = (flags != 0) & (flags != BEGINS | ENDS)
    wrong = numpy.flatnonzero((lengths == 0) & is_end)
    if wrong.size:
        raise DataError(
            f"Sequence {low + wrong[0]} of {pair.prefix} is empty and begins or ends a document of"
            " several: that border would be lost. Write the pair again without empty sequences."
        )
    for number, row in enumerate(rows):
        if flags[number] & BEGINS and len(row) and row[0] == tokenizer.bos_id:
            flags[number] |= HAS_BOS
        if flags[number] & ENDS and len(row) and row[-1] == tokenizer.eos_id:
            flags[number] |= HAS_EOS
    return _cut(tokens.astype(numpy.uint32), lengths, flags, limit)


def _cut(
    tokens: numpy.ndarray, lengths: numpy.ndarray, flags: numpy.ndarray, limit: int
) -> Segments:
    """Cuts each sequence into the fewest pieces, of lengths that differ by one token at most."""
    counts = -(-lengths // limit)
    cut_lengths = numpy.array(
        [
            length // count + (piece < length % count)
            for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
            for piece in range(count)
        ],
        dtype=numpy.int64,
    )
    cut_flags = numpy.zeros(len(cut_lengths), dtype=numpy.uint8)
    some = counts > 0
    ends = numpy.cumsum(counts)[some] - 1
    begins = ends - counts[some] + 1
    cut_flags[begins] |= flags[some] & (BEGINS | HAS_BOS)
    cut_flags[ends] |= flags[some] & (ENDS | HAS_EOS)
    return Segments(tokens, cut_lengths, cut_flags)


def verify(prefix: str | Path) -> CorpusHeader:
    """Reads all of a corpus and compares it with the sums that its writer took.

    Returns:
        The header.

    Raises:
        DataError: a file is damaged.
    """
    corpus = Corpus(prefix)
    with open(path_of(corpus.prefix, ".bin"), "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != corpus.header.bin_sha256:
        raise DataError(
            f"{corpus.prefix}.bin is damaged: it has other bytes than were written (sha256). Copy "
            "the corpus again, or write it again."
        )
    return corpus.header
