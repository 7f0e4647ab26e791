"""Cut texts into segments, between sentences where possible.

Each document is encoded once as a whole, and cut only if it does not fit. This is the hot loop of a
build. Ends of sentences are mapped to ends of tokens; a cut never splits the bytes of a character,
so each piece decodes to text.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy

from stageline.corpus.encoder import Encoder
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CutRules, Segments
from stageline.corpus.sentences import Splitter
from stageline.errors import UserError

# where a sentence too long for a segment may be cut, the best places first: before a newline,
# behind a comma or another sign, before white space
_LEVELS = (
    re.compile(rb"(?=\n)"),
    re.compile(
        rb"[,;:.!?](?=[ \t\n\v\f\r])"
        rb"|\xef\xbc[\x8c\x9b\x9a\x81\x9f]|\xe3\x80[\x81\x82]"  # the wide ones, in UTF-8
    ),
    re.compile(rb"(?<=[^ \t\n\v\f\r])(?=[ \t\n\v\f\r])"),
)


class CutCounts(NamedTuple):
    """Counts of the documents of a call."""

    num_documents: int = 0  # that gave segments
    num_segments: int = 0
    num_tokens: int = 0  # with BOS and EOS
    num_cut_documents: int = 0  # that gave more than one segment
    num_sentences_cut: int = 0  # longer than a segment
    num_empty: int = 0  # documents without any token; they give no segment
    num_changed: int = 0  # the tokenizer changes these: their ids decode to other text


class DocumentCut(NamedTuple):
    """The pieces of a document: tokens of each (int64), BOS and EOS not counted."""

    lengths: numpy.ndarray
    num_cut_sentences: int  # that were longer than a segment


class DocumentCutter:
    """Encodes documents and cuts them into segments. Can be pickled if the splitter can.

    Args:
        splitter: text -> character offsets where sentences end (`stageline.corpus.sentences`);
            not needed where `rules.splits_sentences` is off.

    Raises:
        UserError: the rules ask for what the tokenizer does not have.
    """

    def __init__(self, encoder: Encoder, splitter: Any | None, rules: CutRules) -> None:
        assert splitter is not None or not rules.splits_sentences
        assert rules.pieces == "greedy"
        info, adds = encoder.info, list[bool]()
        for wanted, found, name in (
            (rules.adds_bos, info.bos_id, "BOS"),
            (rules.adds_eos, info.eos_id, "EOS"),
        ):
            if wanted and found is None:
                raise UserError(
                    f"The tokenizer {info.name} has no {name} token. Switch {name} off for this "
                    "corpus, or give the tokenizer one."
                )
            adds.append(found is not None if wanted is None else wanted)
        if rules.seq_length < 1 + sum(adds):
            raise UserError(
                f"Segments of {rules.seq_length} tokens have no room for text with BOS and EOS. "
                "Raise `seq_length`."
            )
        self.encoder = encoder
        self.splitter = splitter if rules.splits_sentences else None
        self.rules = replace(rules, adds_bos=adds[0], adds_eos=adds[1])
        self._bos = numpy.array([info.bos_id] * adds[0], dtype=numpy.uint32)
        self._eos = numpy.array([info.eos_id] * adds[1], dtype=numpy.uint32)

    def __call__(self, texts: Sequence[str]) -> tuple[Segments, CutCounts]:
        """Return segments of a batch of documents, in order; some hundred documents are best."""
        if not self.rules.keeps_newlines:
            texts = [join_lines(text) for text in texts]
        documents, doubtful = self.encoder.encode_and_doubt(texts)
        num_changed = sum(self.encoder.decode(documents[i]) != texts[i] for i in doubtful)
        filled = [(text, ids) for text, ids in zip(texts, documents, strict=True) if len(ids)]
        num_first, num_last = len(self._bos), len(self._eos)
        sizes = numpy.array([len(ids) for _, ids in filled], dtype=numpy.int64)
        too_long = numpy.flatnonzero(sizes > self.rules.seq_length - num_first - num_last)
        cuts = []
        for text, ids in (filled[place] for place in too_long.tolist()):
            ends = self.encoder.byte_ends(text, ids)
            extra = {"num_first": num_first, "num_last": num_last}
            cut = cut_document(text, ids, ends, splitter=self.splitter, rules=self.rules, **extra)
            cuts.append(cut)
        # lengths and flags of all pieces, those of a document from firsts to lasts
        num_pieces = numpy.ones(len(sizes), dtype=numpy.int64)
        num_pieces[too_long] = [len(cut.lengths) for cut in cuts]
        lasts = numpy.cumsum(num_pieces) - 1
        firsts = lasts - num_pieces + 1
        lengths = numpy.empty(int(num_pieces.sum()), dtype=numpy.int64)
        lengths[firsts] = sizes
        for place, cut in zip(too_long.tolist(), cuts, strict=True):
            lengths[firsts[place] : lasts[place] + 1] = cut.lengths
        lengths[firsts] += num_first
        lengths[lasts] += num_last
        flags = numpy.zeros(len(lengths), dtype=numpy.uint8)
        flags[firsts] += BEGINS + HAS_BOS * num_first
        flags[lasts] += ENDS + HAS_EOS * num_last
        parts = [part for _, ids in filled for part in (self._bos, ids, self._eos)]
        tokens = numpy.concatenate(parts or [self._bos[:0]])
        return Segments(tokens, lengths, flags), CutCounts(
            num_documents=len(filled),
            num_segments=len(lengths),
            num_tokens=len(tokens),
            num_cut_documents=len(too_long),
            num_sentences_cut=sum(cut.num_cut_sentences for cut in cuts),
            num_empty=len(texts) - len(filled),
            num_changed=num_changed,
        )


def join_lines(text: str) -> str:
    """Replace each run of white space that has a newline (LF or CR) by one space."""
    if "\r" in text:
        text = text.replace("\r", "\n")
    if "\n" not in text:
        return text
    first, *middle, last = text.split("\n")
    kept = [line for line in map(str.strip, middle) if line]
    return " ".join([first.rstrip(), *kept, last.lstrip()])


def cut_document(
    text: str,
    ids: numpy.ndarray,
    byte_ends: numpy.ndarray,
    *,
    splitter: Splitter | None,
    rules: CutRules,
    num_first: int,
    num_last: int,
) -> DocumentCut:
    """Return the fewest possible pieces of whole sentences, each as long as fits.

    A sentence longer than a segment is taken as its lines, a line too long as its clauses (behind
    a comma or another sign), a clause too long as its words, a word too long as its tokens.

    Args:
        ids: the tokens of the text, without BOS and EOS.
        byte_ends: bytes of text up to the end of each token.
        splitter: None: cut between any two tokens.
        num_first, num_last: 1 where BOS will stand before the first and EOS behind the last piece.

    Raises:
        UserError: one character has more tokens than a segment, or the splitter breaks its rules.
    """
    data = text.encode()
    byte_ends = numpy.asarray(byte_ends, dtype=numpy.int64)
    assert len(ids) == len(byte_ends) > 0 and byte_ends[-1] == len(data), "tokens of another text"
    is_start = (numpy.frombuffer(data, numpy.uint8) & 0xC0) != 0x80  # a character starts here
    # Several tokens may end at one place (bytes of one character, say): the last of them counts.
    is_place = (numpy.diff(byte_ends, append=len(data) + 1) > 0) & (byte_ends > 0)
    if len(data) != len(text):
        is_place[:-1] &= is_start[byte_ends[:-1] * is_place[:-1]]
    places = numpy.flatnonzero(is_place)
    # numbers of tokens after which a cut is allowed, and the bytes of text in them
    counts, bytes_before = places + 1, byte_ends[places]

    def counts_at(byte_places: numpy.ndarray) -> numpy.ndarray:
        """Return places in the text as numbers of tokens; one inside a token moves to its end."""
        return counts[numpy.minimum(bytes_before.searchsorted(byte_places), len(counts) - 1)]

    extra = (num_first, num_last)
    num_cut, ends = 0, counts
    if splitter is not None and rules.splits_sentences:
        sentences = numpy.asarray(splitter(text), numpy.int64)
        rises = len(sentences) and numpy.diff(sentences, prepend=0).min() > 0
        if not rises or sentences[-1] != len(text):
            raise UserError(
                f"the splitter gave the ends {sentences[:5]} ... {sentences[-1:]} for a text of "
                f"{len(text)} characters. Return rising character offsets, the first above 0 and "
                "the last the length of the text."
            )
        if len(data) != len(text):
            sentences = numpy.flatnonzero(is_start).take(sentences[:-1])
            sentences = numpy.append(sentences, len(data))
        ends = numpy.unique(counts_at(sentences))
        num_cut = int((_lengths(ends, extra) > rules.seq_length).sum())
        # units that are too long are taken for their parts, by the coarsest parts that do
        for level in (*_LEVELS, None):
            is_long = _lengths(ends, extra) > rules.seq_length
            if not is_long.any():
                break
            inside = counts
            if level is not None:
                found = [match.end() for match in level.finditer(data)]
                inside = counts_at(numpy.array(found, numpy.int64))
            # the unit that each place is in; a place at a unit's end is there already
            unit = numpy.minimum(ends.searchsorted(inside, "left"), len(ends) - 1)
            ends = numpy.union1d(ends, inside[is_long[unit]])
    lengths = _lengths(ends, extra)
    if lengths.max() > rules.seq_length:
        longest = int(lengths.argmax())
        first, behind = int(ends[longest - 1]) if longest else 0, int(ends[longest])
        start, stop = (int(byte_ends[at - 1]) if at else 0 for at in (first, behind))
        raise UserError(
            f"{data[start:stop].decode(errors='replace')!r} is {behind - first} token(s), with BOS "
            f"and EOS more than the {rules.seq_length} of a segment. Raise `seq_length`."
        )
    chosen = fewest(lengths, rules.seq_length)
    return DocumentCut(numpy.diff(ends[chosen - 1], prepend=0), num_cut)


def _lengths(ends: numpy.ndarray, extra: tuple[int, int]) -> numpy.ndarray:
    """Return tokens of each unit, BOS and EOS counted with the first and the last one."""
    lengths = numpy.diff(ends, prepend=0)
    lengths[0] += extra[0]
    lengths[-1] += extra[1]
    return lengths


def fewest(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Join neighbouring units (sentences, or tokens) into the fewest and longest segments.

    Each segment takes as many units as fit. No other way gives fewer: where the k-th segment ends,
    no other cutting's k-th segment ends later.

    Args:
        unit_lengths: tokens of each unit, positive, at most `limit`.
        limit: tokens of a segment at most.

    Returns:
        int64: number of units before each segment's end; rising, the last is all of them.
    """
    borders = numpy.concatenate([[0], numpy.cumsum(unit_lengths)]).astype(numpy.int64)
    ends: list[int] = []
    last, end = len(borders) - 1, 0
    while end < last:
        after = int(borders.searchsorted(borders[end] + limit, "right")) - 1
        assert after > end, f"unit {end} is longer than {limit}"
        ends.append(end := after)
    return numpy.array(ends, dtype=numpy.int64)
