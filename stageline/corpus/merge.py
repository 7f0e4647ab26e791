"""Joins corpora into one: what has the same type id becomes one type, other types stay apart.

Streams: memory does not grow with the inputs.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from stageline.corpus.corpus_files import Corpus
from stageline.corpus.header import CorpusHeader, path_of
from stageline.corpus.segments import TokenizerInfo
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
    _check_arguments(prefixes, types, new_prefix)
    corpora = [Corpus(prefix) for prefix in prefixes]
    headers = [corpus.header for corpus in corpora]
    for corpus in corpora[1:]:
        _check_alike(corpora[0], corpus)
    kinds = _kinds(corpora, types)
    writer = CorpusWriter(
        new_prefix,
        tokenizer=corpora[0].tokenizer,
        rules=headers[0].rules,
        language="+".join(_each_once(header.language for header in headers)),
        type_names=_names(kinds),
        overwrite=overwrite,
        sources=_each_once(source for header in headers for source in header.sources),
        mixed_rules=_mixed(headers),
    )
    with writer:
        for index, pieces in enumerate(kinds.values()):
            for corpus, kind in pieces:
                start, stop = corpus.type_starts[kind : kind + 2].tolist()
                for low, high in corpus.steps(start, stop):
                    writer.add(corpus.segments(low, high), type_index=index)
        return writer.close()


def refuse_own_input(prefixes: Sequence[str | Path], new_prefix: str | Path) -> None:
    """The output would overwrite what is being read.

    Raises:
        UserError: it would.
    """
    target = os.path.realpath(path_of(new_prefix, ".bin"))
    for prefix in prefixes:
        if os.path.realpath(path_of(prefix, ".bin")) == target:
            raise UserError(
                f"{prefix} is read and would be written too: a corpus is not changed in place."
                " Give another prefix to write to."
            )


def _check_arguments(
    prefixes: Sequence[str | Path], types: Sequence[int], new_prefix: str | Path
) -> None:
    if not prefixes or len(types) != len(prefixes) or min(types) < 0:
        raise UserError(
            f"{len(prefixes)} corpora to merge and type ids {list(types)}: each corpus needs one id"
            " of 0 or more (the same id: joined into one type). Give as many ids as prefixes."
        )
    refuse_own_input(prefixes, new_prefix)


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
            " merged corpus has one limit. Write one of them again with the other's --seq-length."
        )


def _shown(tokenizer: TokenizerInfo) -> str:
    return f"{tokenizer.name!r}, fingerprint {tokenizer.fingerprint[:12]}"


def _kinds(corpora: Sequence[Corpus], types: Sequence[int]) -> dict[tuple[int, int], list[_Piece]]:
    kinds: dict[tuple[int, int], list[_Piece]] = {}
    for corpus, given in zip(corpora, types):
        for kind in corpus.header.types:
            kinds.setdefault((given, kind.id), []).append((corpus, kind.id))
    return dict(sorted(kinds.items()))


def _names(kinds: dict[tuple[int, int], list[_Piece]]) -> list[str]:
    """Names for people: the inputs' own where they have one, else their files'."""
    names: list[str] = []
    for pieces in kinds.values():
        own = _each_once(_name(corpus, kind) for corpus, kind in pieces)
        name = "+".join(own[:3]) + (f"+{len(own) - 3}" if len(own) > 3 else "")
        names.append(name if name not in names else f"{name}:{len(names)}")
    return names


def _name(corpus: Corpus, kind: int) -> str:
    name = corpus.header.types[kind].name
    if not name.isdigit():
        return name
    file = Path(corpus.prefix).name
    return file if len(corpus.header.types) == 1 else f"{file}:{name}"


def _mixed(headers: Sequence[CorpusHeader]) -> list[str]:
    first = asdict(headers[0].rules)
    own = [asdict(header.rules) for header in headers]
    mixed = {name for rules in own for name in rules if rules[name] != first[name]}
    return sorted(mixed.union(*(header.mixed_rules for header in headers)))


def _each_once(values: Iterable) -> list:
    kept: list = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept
