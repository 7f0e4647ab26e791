"""Cuts texts into segments: each document is encoded once as a whole, and cut only if it does not
fit, between sentences where it can be.

The hot loop of a build. Ends of sentences are mapped to ends of tokens; a cut never lies inside the
bytes of a character, so each piece decodes to text.
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy

from stageline.corpus.encoder import Encoder, why_bad
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CutRules, Segments
from stageline.corpus.sentences import Splitter
from stageline.errors import DataError, UserError

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


@dataclass(frozen=True)
class CutCounts:
    """What became of some documents.

    Attributes:
        num_documents: documents that gave segments; with the empty and the bad ones all that came.
        num_segments, num_tokens: of these documents; tokens with BOS and EOS.
        num_cut_documents: that gave more than one segment.
        num_sentences_cut: sentences longer than a segment, which had to be cut inside.
        num_empty: without any token; they give no segment.
        num_bad: that cannot be encoded (`why_bad`); they give no segment.
        num_changed: whose text does not come back from its ids, for the tokenizer drops or
            normalises some of it.
    """

    num_documents: int = 0
    num_segments: int = 0
    num_tokens: int = 0
    num_cut_documents: int = 0
    num_sentences_cut: int = 0
    num_empty: int = 0
    num_bad: int = 0
    num_changed: int = 0

    def __add__(self, other: "CutCounts") -> "CutCounts":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return CutCounts(*(mine + its for mine, its in pairs))


class DocumentCut(NamedTuple):
    """The pieces of a document: tokens of each (int64), BOS and EOS not counted."""

    lengths: numpy.ndarray
    num_cut_sentences: int  # that were longer than a segment


class DocumentCutter:
    """Encodes documents and cuts them into segments. Can be pickled if the splitter can."""

    def __init__(self, encoder: Encoder, splitter: Any | None, rules: CutRules) -> None:
        """Takes the parts.

        Args:
            splitter: text -> character offsets where sentences end (`stageline.corpus.sentences`);
                not needed where `rules.splits_sentences` is off.

        Raises:
            UserError: the rules ask for what the tokenizer or the splitter does not have.
        """
        _check_rules(encoder, splitter, rules)
        self.encoder = encoder
        self.splitter = splitter if rules.splits_sentences else None
        self.rules = rules
        self._num_first = int(rules.adds_bos)
        self._num_last = int(rules.adds_eos)

    def __call__(self, texts: Sequence[str]) -> tuple[Segments, CutCounts]:
        """The segments of a batch of documents, in their order; some hundred documents are best."""
        num_texts = len(texts)
        if not self.rules.keeps_newlines:
            texts = [join_lines(text) for text in texts]
        try:
            documents, doubtful = self.encoder.encode_and_doubt(texts)
        except DataError:
            texts = [text for text in texts if why_bad(text) is None]
            documents, doubtful = self.encoder.encode_and_doubt(texts)
        num_bad = num_texts - len(texts)
        num_changed = sum(self.encoder.decode(documents[i]) != texts[i] for i in doubtful)
        sizes = numpy.array([len(ids) for ids in documents], dtype=numpy.int64)
        num_empty = int((sizes == 0).sum())
        if num_empty:
            texts = [text for text, ids in zip(texts, documents, strict=True) if len(ids)]
            documents = [ids for ids in documents if len(ids)]
            sizes = sizes[sizes > 0]
        segments, num_sentences_cut, num_cut = self._segments(texts, documents, sizes)
        counts = CutCounts(
            num_documents=len(documents),
            num_segments=len(segments),
            num_tokens=len(segments.tokens),
            num_cut_documents=num_cut,
            num_sentences_cut=num_sentences_cut,
            num_empty=num_empty,
            num_bad=num_bad,
            num_changed=num_changed,
        )
        return segments, counts

    def _segments(
        self, texts: Sequence[str], documents: list[numpy.ndarray], sizes: numpy.ndarray
    ) -> tuple[Segments, int, int]:
        """Segments of documents that all have tokens; sentences and documents that were cut."""
        limit = self.rules.seq_length - self._num_first - self._num_last
        too_long = numpy.flatnonzero(sizes > limit)
        cuts = [self._cut(texts[place], documents[place]) for place in too_long.tolist()]
        num_pieces = numpy.ones(len(sizes), dtype=numpy.int64)
        num_pieces[too_long] = [len(cut.lengths) for cut in cuts]
        lasts = numpy.cumsum(num_pieces) - 1
        firsts = lasts - num_pieces + 1
        lengths = numpy.empty(int(num_pieces.sum()), dtype=numpy.int64)
        lengths[firsts] = sizes
        for place, cut in zip(too_long.tolist(), cuts, strict=True):
            lengths[firsts[place] : lasts[place] + 1] = cut.lengths
        lengths[firsts] += self._num_first
        lengths[lasts] += self._num_last
        segments = Segments(self._tokens(documents, sizes), lengths, self._flags(firsts, lasts))
        return segments, sum(cut.num_cut_sentences for cut in cuts), len(too_long)

    def _flags(self, firsts: numpy.ndarray, lasts: numpy.ndarray) -> numpy.ndarray:
        num_segments = int(lasts[-1]) + 1 if len(lasts) else 0
        flags = numpy.zeros(num_segments, dtype=numpy.uint8)
        flags[firsts] += BEGINS + HAS_BOS * self._num_first
        flags[lasts] += ENDS + HAS_EOS * self._num_last
        return flags

    def _tokens(self, documents: list[numpy.ndarray], sizes: numpy.ndarray) -> numpy.ndarray:
        """All tokens in order, with BOS and EOS around each document."""
        bos = self.encoder.info.bos_id if self._num_first else None
        eos = self.encoder.info.eos_id if self._num_last else None
        before = [numpy.array([bos], dtype=numpy.uint32)] if bos is not None else []
        after = [numpy.array([eos], dtype=numpy.uint32)] if eos is not None else []
        parts = [part for ids in documents for part in (*before, ids, *after)]
        return numpy.concatenate(parts) if parts else numpy.zeros(0, dtype=numpy.uint32)

    def _cut(self, text: str, ids: numpy.ndarray) -> DocumentCut:
        return cut_document(
            text,
            ids,
            self.encoder.byte_ends(text, ids),
            splitter=self.splitter,
            rules=self.rules,
            num_first=self._num_first,
            num_last=self._num_last,
        )


def join_lines(text: str) -> str:
    """The text with each run of white space that has a newline (LF or CR) as one space."""
    if "\r" in text:
        text = text.replace("\r", "\n")
    if "\n" not in text:
        return text
    first, *middle, last = text.split("\n")
    kept = [line for line in map(str.strip, middle) if line]
    return " ".join([first.rstrip(), *kept, last.lstrip()])


def _check_rules(encoder: Encoder, splitter: Any | None, rules: CutRules) -> None:
    info = encoder.info
    for wanted, found, name in (
        (rules.adds_bos, info.bos_id, "BOS"),
        (rules.adds_eos, info.eos_id, "EOS"),
    ):
        if wanted and found is None:
            raise UserError(
                f"The tokenizer {info.name} has no {name} token, but documents are to get one: "
                f"switch {name} off for this corpus, or give the tokenizer one."
            )
    room = rules.seq_length - int(rules.adds_bos) - int(rules.adds_eos)
    if room < 1:
        raise UserError(
            f"Segments of {rules.seq_length} tokens have no room for text beside BOS and EOS: "
            "raise `seq_length`."
        )
    assert splitter is not None or not rules.splits_sentences
    assert rules.pieces == "greedy"


@dataclass(frozen=True)
class _Document:
    """A document and the places where it may be cut.

    Attributes:
        data: its UTF-8 bytes.
        counts: int64, numbers of tokens after which a cut may lie; the last is all of them.
        bytes_before: int64, bytes of text in so many tokens.
    """

    text: str
    data: bytes
    counts: numpy.ndarray
    bytes_before: numpy.ndarray

    def counts_at(self, byte_places: numpy.ndarray) -> numpy.ndarray:
        """The places in the text as numbers of tokens; one inside a token moves to its end."""
        places = self.bytes_before.searchsorted(byte_places)
        return self.counts[numpy.minimum(places, len(self.counts) - 1)]


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
    """The fewest pieces there can be, of whole sentences, each as long as fits.

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
    assert len(ids) == len(byte_ends) > 0, "a token without its place"
    document = _cuttable(text, byte_ends)
    extra = (num_first, num_last)
    num_cut, ends = 0, document.counts
    if splitter is not None and rules.splits_sentences:
        ends = _sentence_ends(document, splitter(text))
        num_cut = int((_lengths(ends, extra) > rules.seq_length).sum())
        if num_cut:
            ends = _finer(document, ends, extra, rules.seq_length)
    lengths = _lengths(ends, extra)
    if lengths.max() > rules.seq_length:
        raise _character_too_long(document, ends, lengths, rules.seq_length)
    chosen = fewest(lengths, rules.seq_length)
    return DocumentCut(numpy.diff(ends[chosen - 1], prepend=0), num_cut)


def _cuttable(text: str, byte_ends: numpy.ndarray) -> _Document:
    data = text.encode()
    byte_ends = numpy.asarray(byte_ends, dtype=numpy.int64)
    assert byte_ends[-1] == len(data), "the tokens are not those of the text"
    # of tokens that end at one place (bytes of one character, say) the last one
    is_place = (numpy.diff(byte_ends, append=len(data) + 1) > 0) & (byte_ends > 0)
    if len(data) != len(text):
        is_place[:-1] &= _is_character_start(data)[byte_ends[:-1] * is_place[:-1]]
    places = numpy.flatnonzero(is_place)
    return _Document(text, data, places + 1, byte_ends[places])


def _is_character_start(data: bytes) -> numpy.ndarray:
    return (numpy.frombuffer(data, numpy.uint8) & 0xC0) != 0x80


def _sentence_ends(document: _Document, places: numpy.ndarray) -> numpy.ndarray:
    """Where sentences end, as numbers of tokens, each once."""
    num_letters, places = len(document.text), numpy.asarray(places, numpy.int64)
    if not len(places) or places[-1] != num_letters or numpy.diff(places, prepend=0).min() <= 0:
        raise UserError(
            f"the splitter gave the ends {places[:5]} ... {places[-1:]} for a text of "
            f"{num_letters} characters: rising character offsets were expected, the first above 0 "
            "and the last the length of the text, or the text would not come back from its pieces"
        )
    if len(document.data) != num_letters:
        starts = numpy.flatnonzero(_is_character_start(document.data))
        places = numpy.append(starts.take(places[:-1]), len(document.data))
    return numpy.unique(document.counts_at(places))


def _lengths(ends: numpy.ndarray, extra: tuple[int, int]) -> numpy.ndarray:
    """Tokens of each unit, BOS and EOS counted with the first and the last one."""
    lengths = numpy.diff(ends, prepend=0)
    lengths[0] += extra[0]
    lengths[-1] += extra[1]
    return lengths


def _finer(
    document: _Document, ends: numpy.ndarray, extra: tuple[int, int], limit: int
) -> numpy.ndarray:
    """Takes units that are too long for their parts, by the coarsest parts that do."""
    for level in (*_LEVELS, None):
        lengths = _lengths(ends, extra)
        is_long = lengths > limit
        if not is_long.any():
            break
        inside = document.counts
        if level is not None:
            places = [match.end() for match in level.finditer(document.data)]
            inside = document.counts_at(numpy.array(places, numpy.int64))
        # the unit that each place lies in; a place at a unit's end is there already
        unit = numpy.minimum(ends.searchsorted(inside, "left"), len(ends) - 1)
        ends = numpy.union1d(ends, inside[is_long[unit]])
    return ends


def _character_too_long(
    document: _Document, ends: numpy.ndarray, lengths: numpy.ndarray, limit: int
) -> UserError:
    unit = int(lengths.argmax())
    first, behind = int(ends[unit - 1]) if unit else 0, int(ends[unit])
    places = numpy.concatenate([[0], document.bytes_before])
    counts = numpy.concatenate([[0], document.counts])
    start, stop = places[counts.searchsorted([first, behind])]
    letter = document.data[start:stop].decode(errors="replace")
    added = int(lengths[unit]) - (behind - first)
    with_signs = f" and {added} of BOS and EOS" if added else ""
    return UserError(
        f"{letter!r} is {behind - first} token(s){with_signs}, more than the {limit} of a segment, "
        "and a character cannot be cut: raise `seq_length`"
    )


def fewest(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Join neighbouring units (sentences, or tokens) into the fewest and longest segments.

    Each segment takes as many units as fit. No other way gives fewer: where the k-th segment ends,
    no other cutting's k-th segment ends later.

    Args:
        unit_lengths: tokens of each unit, positive, at most `limit`.
        limit: tokens of a segment at most.

    Returns:
        int64: how many units lie before each segment's end; rising, the last is all of them.
    """
    borders = numpy.concatenate([[0], numpy.cumsum(unit_lengths)]).astype(numpy.int64)
    ends: list[int] = []
    last, end = len(borders) - 1, 0
    while end < last:
        after = int(borders.searchsorted(borders[end] + limit, "right")) - 1
        assert after > end, f"unit {end} is longer than {limit}"
        ends.append(end := after)
    return numpy.array(ends, dtype=numpy.int64)
