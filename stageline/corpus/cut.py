"""Cuts one tokenised document that does not fit into a segment, between sentences where it can.

The document was encoded as a whole; ends of sentences are mapped to ends of tokens. A cut never
lies inside the bytes of a character: each piece decodes to text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from stageline.corpus.cutting_places import LEVELS
from stageline.corpus.rising import differences, union
from stageline.corpus.segmentation import even, fewest
from stageline.corpus.segments import CutRules
from stageline.corpus.sentences import Splitter, ends_of_each
from stageline.errors import UserError


@dataclass(frozen=True)
class Cut:
    """What became of a document.

    Attributes:
        lengths: int64, tokens of each piece, BOS and EOS not counted.
        num_cut_sentences: sentences that were longer than a segment and had to be cut.
    """

    lengths: numpy.ndarray
    num_cut_sentences: int


@dataclass(frozen=True)
class _Document:
    """A document and the places where it may be cut.

    Attributes:
        data: its UTF-8 bytes; `data_array` the same as numbers.
        counts: int64, numbers of tokens after which a cut may lie; the last is all of them.
        bytes_before: int64, bytes of text in so many tokens.
    """

    text: str
    data: bytes
    counts: numpy.ndarray
    bytes_before: numpy.ndarray

    @property
    def data_array(self) -> numpy.ndarray:
        return numpy.frombuffer(self.data, numpy.uint8)

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
) -> Cut:
    """The fewest pieces there can be, of whole sentences.

    A sentence longer than a segment is taken as its lines, a line too long as its clauses (behind
    a comma or another sign), a clause too long as its words, a word too long as its tokens.

    Args:
        text: the document.
        ids: its tokens, without BOS and EOS.
        byte_ends: bytes of text up to the end of each token.
        splitter: None: cut between any two tokens.
        rules: the longest segment, and how the pieces are made.
        num_first, num_last: 1 where BOS will stand before the first and EOS behind the last piece.

    Raises:
        UserError: one character has more tokens than a segment, or the splitter breaks its rules.
    """
    assert len(ids) == len(byte_ends) > 0, "a token without its place"
    places = splitter(text) if splitter is not None and rules.splits_sentences else None
    return _cut(text, byte_ends, places, rules, (num_first, num_last))


def cut_documents(
    texts: Sequence[str],
    byte_ends: Sequence[numpy.ndarray],
    *,
    splitter: Splitter | None,
    rules: CutRules,
    num_first: int,
    num_last: int,
) -> list[Cut]:
    """What `cut_document` makes of each; quicker, as short documents are split together.

    Args as of `cut_document`, of each document.
    """
    places: Sequence[numpy.ndarray | None] = [None] * len(texts)
    if splitter is not None and rules.splits_sentences:
        places = ends_of_each(splitter, texts)
    return [
        _cut(text, ends, found, rules, (num_first, num_last))
        for text, ends, found in zip(texts, byte_ends, places, strict=True)
    ]


def _cut(
    text: str,
    byte_ends: numpy.ndarray,
    places: numpy.ndarray | None,
    rules: CutRules,
    extra: tuple[int, int],
) -> Cut:
    """Cuts where sentences end: character offsets; None: between any two tokens."""
    document = _cuttable(text, byte_ends)
    num_cut, ends = 0, document.counts
    if places is not None:
        ends = _sentence_ends(document, places)
        num_cut = int((_lengths(ends, extra) > rules.seq_length).sum())
        if num_cut:
            ends = _finer(document, ends, extra, rules.seq_length)
    lengths = _lengths(ends, extra)
    if lengths.max() > rules.seq_length:
        raise _character_too_long(document, ends, lengths, extra, rules.seq_length)
    chosen = _policy(rules.pieces)(lengths, rules.seq_length)
    return Cut(differences(ends.take(chosen - 1)), num_cut)


def _policy(pieces: str) -> Callable[[numpy.ndarray, int], numpy.ndarray]:
    policies = {"even": even, "greedy": fewest}
    if pieces not in policies:
        raise UserError(f"pieces is {pieces!r}; known are {', '.join(map(repr, policies))}")
    return policies[pieces]


def _cuttable(text: str, byte_ends: numpy.ndarray) -> _Document:
    data = text.encode()
    byte_ends = numpy.asarray(byte_ends, dtype=numpy.int64)
    assert byte_ends[-1] == len(data), "the tokens are not those of the text"
    # of tokens that end at one place (bytes of one character, say) the last one
    is_place = numpy.empty(len(byte_ends), bool)
    is_place[-1] = True
    numpy.less(byte_ends[:-1], byte_ends[1:], out=is_place[:-1])
    if byte_ends[0] == 0:
        is_place &= byte_ends > 0
    if len(data) != len(text):
        is_place[:-1] &= _is_character_start(data)[byte_ends[:-1] * is_place[:-1]]
    if is_place.all():
        counts = numpy.arange(1, len(byte_ends) + 1, dtype=numpy.int64)
        return _Document(text, data, counts, byte_ends)
    places = numpy.flatnonzero(is_place)
    return _Document(text, data, places + 1, byte_ends[places])


def _is_character_start(data: bytes) -> numpy.ndarray:
    return (numpy.frombuffer(data, numpy.uint8) & 0xC0) != 0x80


def _sentence_ends(document: _Document, places: numpy.ndarray) -> numpy.ndarray:
    """Where sentences end, as numbers of tokens, each once."""
    num_letters, places = len(document.text), numpy.asarray(places, numpy.int64)
    if not len(places) or places[-1] != num_letters or differences(places).min() <= 0:
        raise UserError(
            f"the splitter gave the ends {places[:5]} ... {places[-1:]} for a text of "
            f"{num_letters} characters: rising character offsets were expected, the first above 0 "
            "and the last the length of the text, or the text would not come back from its pieces"
        )
    if len(document.data) != num_letters:
        starts = numpy.flatnonzero(_is_character_start(document.data))
        places = numpy.append(starts.take(places[:-1]), len(document.data))
    counts = document.counts_at(places)
    is_new = numpy.ones(len(counts), bool)
    numpy.less(counts[:-1], counts[1:], out=is_new[1:])
    return counts[is_new]


def _lengths(ends: numpy.ndarray, extra: tuple[int, int]) -> numpy.ndarray:
    """Tokens of each unit, BOS and EOS counted with the first and the last one."""
    lengths = differences(ends)
    lengths[0] += extra[0]
    lengths[-1] += extra[1]
    return lengths


def _finer(
    document: _Document, ends: numpy.ndarray, extra: tuple[int, int], limit: int
) -> numpy.ndarray:
    """Takes units that are too long for their parts, by the coarsest parts that do."""
    for level in (*LEVELS, None):
        lengths = _lengths(ends, extra)
        is_long = lengths > limit
        if not is_long.any():
            break
        inside = (
            document.counts if level is None else document.counts_at(level(document.data_array))
        )
        # the unit that each place lies in; a place at a unit's end is there already
        unit = numpy.minimum(ends.searchsorted(inside, "left"), len(ends) - 1)
        ends = union(ends, inside[is_long[unit]])
    return ends


def _character_too_long(
    document: _Document,
    ends: numpy.ndarray,
    lengths: numpy.ndarray,
    extra: tuple[int, int],
    limit: int,
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
        "and a character cannot be cut: raise --seq-length"
    )
