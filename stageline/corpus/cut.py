"""Cuts one tokenised document that does not fit into a segment, between sentences where it can.

The document was encoded as a whole; ends of sentences are mapped to ends of tokens. A cut never
lies inside the bytes of a character: each piece decodes to text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy

from stageline.corpus.header import CutRules
from stageline.corpus.sentences import Splitter, differences, ends_of_each, union
from stageline.errors import UserError

# -- where a sentence that is too long for a segment may be cut, the best places first ------------
# All functions take the UTF-8 bytes of a text and give byte offsets, rising.

_NEWLINE = ord("\n")
_SPACES = numpy.zeros(256, bool)
_SPACES[list(b" \t\n\v\f\r")] = True
_CLAUSE_ENDS = numpy.zeros(256, bool)
_CLAUSE_ENDS[list(b",;:.!?")] = True
# last byte of each sign, under the bytes before it
_WIDE_CLAUSE_ENDS = ((0xEF, 0xBC, b"\x8c\x9b\x9a\x81\x9f"), (0xE3, 0x80, b"\x81\x82"))


def before_newlines(data: numpy.ndarray) -> numpy.ndarray:
    """Before each run of white space that begins with a newline."""
    return numpy.flatnonzero(data == _NEWLINE)


def after_clauses(data: numpy.ndarray) -> numpy.ndarray:
    """Behind `, ; : . ! ?` before white space, and behind `， ； ： 、 。 ！ ？`."""
    is_end = _CLAUSE_ENDS[data[:-1]] & _SPACES[data[1:]]
    places = [numpy.flatnonzero(is_end) + 1]
    for first, second, lasts in _WIDE_CLAUSE_ENDS:
        found = numpy.flatnonzero((data[:-2] == first) & (data[1:-1] == second)) + 2
        places.append(found[numpy.isin(data[found], list(lasts))] + 1)
    return union(*places)


def before_spaces(data: numpy.ndarray) -> numpy.ndarray:
    """Before each run of white space."""
    is_space = _SPACES[data]
    return numpy.flatnonzero(is_space[1:] & ~is_space[:-1]) + 1


LEVELS = (before_newlines, after_clauses, before_spaces)


# -- joins neighbouring units (sentences, or tokens) into segments of at most `limit` tokens ------
# Pure integers: knows neither text nor tokenizers. Both functions give the fewest segments there
# can be. Forward greedy is optimal in that: where its k-th segment ends, no other cutting's k-th
# segment ends later, as a segment that starts no earlier and takes all that fits ends no earlier.

# more than any sum of squares of a document: 2^31 tokens in one segment
_NEVER = numpy.int64(2**62)
# a table of more cells than this is walked by the strip of its cells that can matter
_DENSE_CELLS = 12_000
MOST_AT_ONCE = 4096  # segments that are evened together: four million tokens at 1,024


def fewest(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Each segment takes as many units as fit.

    Args:
        unit_lengths: tokens of each unit, positive, at most `limit`.
        limit: tokens of a segment at most.

    Returns:
        int64: how many units lie before each segment's end; rising, the last is all of them.
    """
    ends = _borders(unit_lengths)
    return numpy.array(_forward(ends, limit), dtype=numpy.int64)


def even(unit_lengths: numpy.ndarray, limit: int) -> numpy.ndarray:
    """Of all cuttings into the fewest segments the one with the least sum of squared lengths.

    As the number of segments is fixed, so is their mean: the least sum of squares is the least
    spread. Of several such cuttings the one whose cuts all lie latest (there is one: of two best
    cuttings the later one at every cut is a best one too, as squares are convex).

    The work grows with the square of the number of segments, so a document of more than
    `MOST_AT_ONCE` is evened stretch by stretch: still the fewest, and as even but for the borders
    of stretches.

    Args and result as of `fewest`.
    """
    return _even(_borders(unit_lengths), limit)


def _even(borders: numpy.ndarray, limit: int) -> numpy.ndarray:
    latest = _forward(borders, limit)
    if len(latest) <= 1:
        return numpy.array(latest, dtype=numpy.int64)
    if len(latest) == 2:
        return numpy.array([_middle(borders), latest[1]], dtype=numpy.int64)
    pieces = _equal_pieces(borders, len(latest))
    if pieces is not None:
        return pieces
    if len(latest) > MOST_AT_ONCE:
        return _by_stretches(borders, latest, limit)
    return _least_squares(borders, latest, limit)


def _borders(unit_lengths: numpy.ndarray) -> numpy.ndarray:
    """Tokens before each border between units, both outer ones included."""
    borders = numpy.zeros(len(unit_lengths) + 1, dtype=numpy.int64)
    numpy.cumsum(unit_lengths, out=borders[1:])
    return borders


def _forward(borders: numpy.ndarray, limit: int) -> list[int]:
    """Borders where greedy segments end: nothing ends its k-th segment later."""
    ends: list[int] = []
    last, end = len(borders) - 1, 0
    while end < last:
        after = int(borders.searchsorted(borders[end] + limit, "right")) - 1
        assert after > end, f"unit {end} is longer than {limit}"
        ends.append(end := after)
    return ends


def _backward(borders: numpy.ndarray, limit: int) -> list[int]:
    """Borders where segments end if the last ones take what fits: nothing ends its k-th earlier."""
    ends, end = [], len(borders) - 1
    while end > 0:
        ends.append(end)
        end = int(borders.searchsorted(borders[end] - limit, "left"))
    return ends[::-1]


def _middle(borders: numpy.ndarray) -> int:
    """The border nearest to the middle, the later one of two. Where any fits, this one does."""
    total = int(borders[-1])
    # twice: a middle between two tokens stays an integer
    after = int(borders.searchsorted((total + 1) // 2, "left"))
    is_before_nearer = total - 2 * int(borders[after - 1]) < 2 * int(borders[after]) - total
    return after - 1 if is_before_nearer else after


def _equal_pieces(borders: numpy.ndarray, num_pieces: int) -> numpy.ndarray | None:
    """Units of one token: lengths that differ by one at most, the longer ones first.

    The first and the last unit may be longer (BOS and EOS), up to a piece. None: other units.
    """
    num_units, total = len(borders) - 1, int(borders[-1])
    first, inner = int(borders[1]), int(borders[-2] - borders[1])
    length, num_longer = divmod(total, num_pieces)
    if inner != num_units - 2 or max(first, total - inner - first) > length:
        return None
    piece = numpy.arange(1, num_pieces + 1, dtype=numpy.int64)
    ends = piece * length + numpy.minimum(piece, num_longer) - (first - 1)
    ends[-1] = num_units
    return ends


def _by_stretches(borders: numpy.ndarray, latest: list[int], limit: int) -> numpy.ndarray:
    """The first stretch evened, then the rest; they have as many segments as all together."""
    num_pieces = len(latest)
    count = num_pieces // -(-num_pieces // MOST_AT_ONCE)
    ideal = int(borders.searchsorted(borders[-1] * count / num_pieces))
    # between both any border leaves as many segments before and behind it as there have to be
    earliest = _backward(borders, limit)
    cut = min(max(ideal, earliest[count - 1]), latest[count - 1])
    first = _even(borders[: cut + 1], limit)
    return numpy.concatenate([first, cut + _even(borders[cut:] - borders[cut], limit)])


def _least_squares(borders: numpy.ndarray, latest: list[int], limit: int) -> numpy.ndarray:
    """Dynamic programming over the k-th cut, in the band where the best k-th cut can lie."""
    earliest = _backward(borders, limit)
    num_pieces, total = len(latest), int(borders[-1])
    length = total // num_pieces
    squares = _squares_of_a_guess(borders, earliest, limit)
    # what each piece of the best cutting adds to that of equal pieces is (n-length)(n-length-1),
    # no negative number; none adds more than all pieces of the guess
    added = squares - (2 * length + 1) * total + length * (length + 1) * num_pieces
    reach = isqrt(4 * added + 1) // 2 + 1
    shortest, longest = max(1, length + 1 - reach), min(limit, length + reach)
    low, high = _band(borders, earliest, latest, squares - total * total / num_pieces)
    choices = []
    places = borders[low[0] : high[0] + 1][::-1]  # descending: argmin takes the latest of equals
    costs = places * places
    for cut in range(1, num_pieces):
        targets = borders[low[cut] : high[cut] + 1][::-1]
        costs, choice = _step(places, costs, targets, shortest, longest)
        choices.append(choice)
        places = targets
    return _walk_back(choices, high)


def _step(
    sources: numpy.ndarray,
    costs: numpy.ndarray,
    targets: numpy.ndarray,
    shortest: int,
    longest: int,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """For each target the cheapest way to it, and which source that comes from."""
    if len(sources) * len(targets) > _DENSE_CELLS:
        return _strip_step(sources, costs, targets, shortest, longest)
    lengths = targets[:, None] - sources
    table = lengths * lengths
    table += costs
    if targets[0] - sources[-1] > longest:
        table[lengths > longest] = _NEVER
    choice = table.argmin(axis=1)
    return table.min(axis=1), choice


def _strip_step(
    sources: numpy.ndarray,
    costs: numpy.ndarray,
    targets: numpy.ndarray,
    shortest: int,
    longest: int,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The same; looks only at lengths from `shortest` to `longest`."""
    rising = -sources
    first = rising.searchsorted(shortest - targets, "left")
    behind = rising.searchsorted(longest - targets, "right")
    width = max(1, int((behind - first).max()))
    places = first[:, None] + numpy.arange(width)
    numpy.minimum(places, len(sources) - 1, out=places)
    lengths = targets[:, None] - sources[places]
    table = lengths * lengths
    table += costs[places]
    table[lengths > longest] = _NEVER  # none is shorter than `shortest`
    best = table.argmin(axis=1)
    rows = numpy.arange(len(targets))
    return table[rows, best], places[rows, best]


def _walk_back(choices: list[numpy.ndarray], high: list[int]) -> numpy.ndarray:
    ends = numpy.empty(len(choices) + 1, dtype=numpy.int64)
    place = 0
    ends[-1] = high[-1]
    for cut in range(len(choices) - 1, -1, -1):
        place = int(choices[cut][place])
        ends[cut] = high[cut] - place
    return ends


def _squares_of_a_guess(borders: numpy.ndarray, earliest: list[int], limit: int) -> int:
    """What the squares of a good cutting sum up to. Those of the best are no more."""
    num_pieces, total = len(earliest), int(borders[-1])
    ideal = numpy.arange(1, num_pieces) * (total / num_pieces)
    after = borders.searchsorted(ideal)
    after -= ideal - borders[after - 1] < borders[after] - ideal
    lengths = differences(numpy.append(borders[after], total))
    if lengths.max() > limit:
        lengths = _careful_lengths(borders, earliest, limit)
    return int((lengths * lengths).sum())


def _careful_lengths(borders: numpy.ndarray, earliest: list[int], limit: int) -> numpy.ndarray:
    """Piece by piece: a share of what is left, within what fits and what lets the rest fit."""
    num_pieces, total, end = len(earliest), int(borders[-1]), 0
    ends: list[int] = []
    for cut in range(num_pieces - 1):
        start = int(borders[end])
        share = (total - start) / (num_pieces - cut)
        reach = int(borders.searchsorted(start + limit, "right")) - 1
        wish = int(borders.searchsorted(start + share))
        wish -= int(2 * (start + share) < borders[wish - 1] + borders[wish])
        ends.append(end := min(reach, max(wish, earliest[cut])))
    return differences(borders[[*ends, len(borders) - 1]])


def _band(
    borders: numpy.ndarray, earliest: list[int], latest: list[int], excess: float
) -> tuple[list[int], list[int]]:
    """First and last border where each cut of the best cutting can lie.

    By Cauchy's inequality a cut after `j` of `k` pieces that is `d` tokens off its ideal place
    costs at least d^2/j + d^2/(k-j), which is no more than what the guess costs.
    """
    num_pieces, total = len(latest), int(borders[-1])
    num_before = numpy.arange(1, num_pieces)
    ideal = num_before * (total / num_pieces)
    share = num_before * (num_pieces - num_before) / num_pieces
    off = numpy.sqrt(max(excess, 0.0) * share) + 1e-3
    low = numpy.maximum(borders.searchsorted(ideal - off, "left"), earliest[:-1])
    high = numpy.minimum(borders.searchsorted(ideal + off, "right") - 1, latest[:-1])
    return [*low.tolist(), latest[-1]], [*high.tolist(), latest[-1]]


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentCut:
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
) -> DocumentCut:
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
) -> list[DocumentCut]:
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
) -> DocumentCut:
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
    return DocumentCut(differences(ends.take(chosen - 1)), num_cut)


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
        "and a character cannot be cut: raise `seq_length`"
    )
