"""Checks a whole corpus: every checksum, and all that must hold of its segments."""

import hashlib
import json
from pathlib import Path

import numpy

from stageline.corpus.corpus_files import Corpus
from stageline.corpus.files_out import CHUNK, read_chunks
from stageline.corpus.header import CorpusHeader, path_of
from stageline.corpus.segments import BEGINS, ENDS, HAS_BOS, HAS_EOS, TokenizerInfo
from stageline.corpus.writer import ENDINGS, count_endings
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
