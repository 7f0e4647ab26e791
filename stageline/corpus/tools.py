"""Merge, thin out, convert and check finished corpora.

All of it streams, so memory does not grow with the inputs.
"""

import hashlib
import os
from collections.abc import Sequence
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
    damaged,
    path_of,
)
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError


def merge(
    prefixes: Sequence[str | Path],
    types: Sequence[int],
    new_prefix: str | Path,
    *,
    overwrite: bool = False,
) -> CorpusHeader:
    """Write the segments of several corpora as one corpus.

    Inputs of the same type id are joined, in the order given. An input that has several types
    itself keeps them apart: its type k is joined with type k of the others of that id. The types
    of the result are numbered from 0, by id and then by type within the inputs.

    Args:
        types: an id for each prefix.

    Raises:
        UserError: not one id a prefix, or an input that is the output.
        DataError: inputs of different tokenizers or segment lengths.
    """
    if not prefixes or len(types) != len(prefixes) or min(types) < 0:
        raise UserError(
            f"{len(prefixes)} corpora to merge and type ids {list(types)}. Give one id of 0 or "
            "more for each prefix; the same id joins them into one type."
        )
    _refuse_own_input(prefixes, new_prefix)
    first, *others = corpora = [Corpus(prefix) for prefix in prefixes]
    for other in others:
        one, two = first.tokenizer, other.tokenizer
        limits = first.header.rules.seq_length, other.header.rules.seq_length
        tokenizers = [f"{own.name!r}, fingerprint {own.fingerprint[:12]}" for own in (one, two)]
        for what, is_alike, shown in (
            ("tokenizers", one.fingerprint == two.fingerprint, tokenizers),
            ("vocabularies", one.vocab_size == two.vocab_size, (one.vocab_size, two.vocab_size)),
            ("`seq_length`", limits[0] == limits[1], limits),
        ):
            if not is_alike:
                raise DataError(
                    f"{first.prefix} and {other.prefix} have different {what}: {shown[0]} and "
                    f"{shown[1]}. Write one of them again as the other was."
                )
    kinds: dict[tuple[int, int], list[tuple[Corpus, int]]] = {}  # -> (corpus, index of its type)
    for corpus, given in zip(corpora, types, strict=True):
        for own in corpus.header.types:
            kinds.setdefault((given, own.id), []).append((corpus, own.id))
    kinds = dict(sorted(kinds.items()))
    names: list[str] = []  # up to three names of what was joined
    for pieces in kinds.values():
        joined = list(dict.fromkeys(corpus.header.types[kind].name for corpus, kind in pieces))
        name = "+".join(joined[:3]) + (f"+{len(joined) - 3}" if len(joined) > 3 else "")
        names.append(name if name not in names else f"{name}:{len(names)}")
    sources: list = []
    for source in (source for corpus in corpora for source in corpus.header.sources):
        sources += [] if source in sources else [source]
    writer = CorpusWriter(
        new_prefix,
        tokenizer=first.tokenizer,
        rules=first.header.rules,
        language="+".join(dict.fromkeys(corpus.header.language for corpus in corpora)),
        type_names=names,
        overwrite=overwrite,
        sources=sources,
    )
    with writer:
        for index, pieces in enumerate(kinds.values()):
            for corpus, kind in pieces:
                start, stop = corpus.type_starts[kind : kind + 2].tolist()
                for low, high in corpus.steps(start, stop):
                    writer.add(corpus.segments(low, high), type_index=index)
        return writer.close()


def _refuse_own_input(prefixes: Sequence[str | Path], new_prefix: str | Path) -> None:
    """Refuse to overwrite what is being read."""
    target = os.path.realpath(path_of(new_prefix, ".bin"))
    for prefix in prefixes:
        if os.path.realpath(path_of(prefix, ".bin")) == target:
            raise UserError(f"{prefix} is not changed in place. Give another prefix to write to.")


def remove(
    prefix: str | Path,
    new_prefix: str | Path,
    indices: Sequence[int] | numpy.ndarray,
    *,
    overwrite: bool = False,
) -> CorpusHeader:
    """Write exactly the segments whose index is not in `indices`, in their order.

    What is left of a document on either side of a hole becomes a document of its own: its first
    segment begins it and its last one ends it. BOS and EOS stay where they were.

    Raises:
        UserError: an index outside the corpus, or the output is the input.
    """
    _refuse_own_input([prefix], new_prefix)
    corpus = Corpus(prefix)
    header = corpus.header
    gone = numpy.unique(numpy.asarray(indices, dtype=numpy.int64))
    wrong = gone[(gone < 0) | (gone >= len(corpus))]
    if wrong.size:
        raise UserError(
            f"{prefix} has segments 0 to {len(corpus) - 1}, none of the number {wrong[0]}. Find "
            "the segments of this corpus."
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
                here = corpus.segments(low, high)
                # one neighbour more on either side: a hole there ends or begins a document here
                stays = numpy.ones(high - low + 2, dtype=bool)
                first, last = numpy.searchsorted(gone, [low - 1, high + 1])
                stays[gone[first:last] - (low - 1)] = False
                flags = here.flags | (BEGINS * ~stays[:-2]).astype(numpy.uint8)
                flags |= (ENDS * ~stays[2:]).astype(numpy.uint8)
                stay = stays[1:-1]
                tokens = here.tokens[numpy.repeat(stay, here.lengths)]
                writer.add(Segments(tokens, here.lengths[stay], flags[stay]), type_index=kind)
        return writer.close()


def to_megatron(
    prefix: str | Path, new_prefix: str | Path, *, overwrite: bool = False
) -> list[Path]:
    """Write a corpus as files of Megatron-core: a segment a sequence, documents as they are.

    Returns:
        The prefixes written: `new_prefix`, or one a type (NEW_PREFIX_0, ...) for several types,
        as Megatron-core mixes prefixes and knows no types within one.

    Raises:
        UserError: there are such files already, and no `overwrite`.
    """
    corpus = Corpus(prefix)
    starts = corpus.type_starts.tolist()
    kinds = range(len(starts) - 1)
    targets = [path_of(new_prefix, f"_{kind}" * (len(kinds) > 1)) for kind in kinds]
    for target in targets:
        _refuse_own_input([prefix], target)
        if path_of(target, ".idx").exists() and not overwrite:
            raise UserError(f"{target}.idx exists. Give another prefix, or add `overwrite`.")
    for target, start, stop in zip(targets, starts, starts[1:]):
        write_megatron(corpus, target, start, stop)
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
    """Write a Megatron-core pair as a corpus: a sequence a segment, documents as they are.

    Args:
        tokenizer: what made the ids; Megatron-core's files do not say.
        seq_length: longer sequences are cut into the fewest pieces of nearly equal length; None:
            as long as the longest one is.

    A first id that is the tokenizer's BOS, and a last that is its EOS, count as added.

    Raises:
        DataError: an id that the tokenizer does not have.
    """
    _refuse_own_input([prefix], new_prefix)
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
            rows = [pair[index] for index in range(low, high)]
            flags, lengths = pair.flags(low, high).copy(), pair.lengths(low, high)
            tokens = numpy.concatenate(rows)
            wrong = tokens[(tokens < 0) | (tokens >= 1 << 32)]
            if wrong.size:
                raise DataError(
                    f"{prefix}.bin holds {wrong[0]}; ids are 0 or more and below 2^32. Give the "
                    "prefix of a tokenised text."
                )
            # an empty document vanishes, but an empty end of one would take the border along
            is_end = (flags != 0) & (flags != BEGINS | ENDS)
            wrong = numpy.flatnonzero((lengths == 0) & is_end)
            if wrong.size:
                raise DataError(
                    f"Sequence {low + wrong[0]} of {prefix} is empty and begins or ends a document "
                    "of several. Write the pair again without empty sequences."
                )
            for number, row in enumerate(rows):
                if flags[number] & BEGINS and len(row) and row[0] == tokenizer.bos_id:
                    flags[number] |= HAS_BOS
                if flags[number] & ENDS and len(row) and row[-1] == tokenizer.eos_id:
                    flags[number] |= HAS_EOS
            writer.add(_cut(tokens.astype(numpy.uint32), lengths, flags, limit))
        return writer.close()


def _cut(
    tokens: numpy.ndarray, lengths: numpy.ndarray, flags: numpy.ndarray, limit: int
) -> Segments:
    """Cut each sequence into the fewest pieces, of lengths that differ by one token at most."""
    counts = -(-lengths // limit)
    some = counts > 0
    lengths, flags, counts = lengths[some], flags[some], counts[some]
    ends = numpy.cumsum(counts) - 1
    begins = ends - counts + 1
    place = numpy.arange(counts.sum()) - numpy.repeat(
        begins, counts
    )  # number of a piece in its sequence
    cut_lengths = numpy.repeat(lengths // counts, counts)
    cut_lengths += place < numpy.repeat(lengths % counts, counts)
    cut_flags = numpy.zeros(len(cut_lengths), dtype=numpy.uint8)
    cut_flags[begins] |= flags & (BEGINS | HAS_BOS)
    cut_flags[ends] |= flags & (ENDS | HAS_EOS)
    return Segments(tokens, cut_lengths, cut_flags)


def verify(prefix: str | Path) -> CorpusHeader:
    """Return the header of a corpus; raise DataError if its bytes are not those written."""
    corpus = Corpus(prefix)
    with open(path_of(corpus.prefix, ".bin"), "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != corpus.header.bin_sha256:
        raise damaged(path_of(prefix, ".bin"), "it has other bytes than were written (sha256)")
    return corpus.header
