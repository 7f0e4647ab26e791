"""Where sentences end in text with spaces between its words.

All that is asked here is asked of the gaps between words, as an end goes before white space.
"""

from dataclasses import dataclass

import numpy

from stageline.corpus.abbreviations import is_abbreviation
from stageline.corpus.characters import CLOSER, EAST_ASIAN, LOWER, NEWLINE, STOP, WHITE

# a line of so many characters may have been wrapped in the middle of a sentence
_SHORTEST_WRAPPED = 40
_LONGEST_WRAPPED = 120
# `...")` has no more of them in a row that matters
_MOST_CLOSERS = 4
_DOTS = (ord("."), ord("…"))
_BULLETS = numpy.array(sorted(map(ord, "-*+#>|•·◦–—")))


@dataclass(frozen=True)
class Gaps:
    """The white space between words.

    Attributes:
        starts: int64, where the white space of each begins.
        words: int64, where the word behind it begins.
    """

    starts: numpy.ndarray
    words: numpy.ndarray


def find_gaps(flags: numpy.ndarray) -> Gaps:
    """White space before the first word and behind the last one is no gap."""
    white = flags & WHITE
    flips = numpy.flatnonzero(white[1:] != white[:-1]) + 1
    first = int(white[0])
    words = flips[first + 1 :: 2]
    return Gaps(flips[first::2][: len(words)], words)


def newline_gaps(flags: numpy.ndarray, gaps: Gaps) -> tuple[numpy.ndarray, ...]:
    """(the gaps with newlines, whether a blank line is in them, length of the line before)."""
    newlines = numpy.flatnonzero(flags & NEWLINE)
    places = gaps.starts.searchsorted(newlines, "right") - 1
    is_first = numpy.ones(len(newlines), bool)
    is_first[1:] = places[1:] != places[:-1]
    is_blank = numpy.zeros(len(newlines), bool)
    is_blank[:-1] = ~is_first[1:]
    line_starts = numpy.zeros(len(newlines), numpy.int64)
    line_starts[1:] = newlines[:-1] + 1
    # behind the last word the newest gap's number comes again: beyond its word
    if len(gaps.words):
        is_first &= (places >= 0) & (newlines < gaps.words[places])
    else:
        is_first[:] = False
    chosen = places[is_first]
    return chosen, is_blank[is_first], gaps.starts[chosen] - line_starts[is_first]


def western_ends(codes: numpy.ndarray, flags: numpy.ndarray) -> numpy.ndarray:
    """Ends inside the text; see `stageline.corpus.sentences` for the rules."""
    gaps = find_gaps(flags)
    is_end = numpy.zeros(len(gaps.starts), bool)
    lines, is_blank, lengths = newline_gaps(flags, gaps)
    is_line_end = numpy.zeros(len(gaps.starts) + 1, bool)
    is_line_end[lines] = True
    is_line_end[-1] = True  # "the gap before" the first word
    is_end[_stops(codes, flags, gaps, is_line_end)] = True
    is_end[lines[is_blank | ~_is_wrapped(codes, flags, gaps, lines, lengths)]] = True
    return gaps.starts[is_end]


def _stops(
    codes: numpy.ndarray, flags: numpy.ndarray, gaps: Gaps, is_line_end: numpy.ndarray
) -> numpy.ndarray:
    """Gaps behind a full stop, exclamation or question mark that ends a sentence."""
    chosen = numpy.flatnonzero(flags[gaps.starts - 1] & (STOP | CLOSER))
    ends = gaps.starts[chosen]
    stops = ends - 1
    for _ in range(_MOST_CLOSERS):
        stops -= (flags[stops] & CLOSER) != 0
        numpy.maximum(stops, 0, out=stops)
    is_stop = (flags[stops] & STOP) != 0
    chosen, ends, stops = chosen[is_stop], ends[is_stop], stops[is_stop]
    signs, words = codes[stops], gaps.words[chosen]
    goes_on = (flags[words] & LOWER) != 0
    # `Why? because`, but `"Why?" he asked` and `and ... then` are one sentence
    is_bare = (signs != _DOTS[0]) & (signs != _DOTS[1]) & (stops == ends - 1)
    is_end = is_bare | ~goes_on
    is_single = is_end & (signs == _DOTS[0])
    is_single &= codes[numpy.maximum(stops - 1, 0)] != _DOTS[0]
    dots = numpy.flatnonzero(is_single)
    belongs = is_abbreviation(codes, stops[dots], words[dots])
    belongs |= _is_label(codes, gaps, is_line_end, chosen[dots])
    is_end[dots[belongs]] = False
    return chosen[is_end]


def _is_label(
    codes: numpy.ndarray, gaps: Gaps, is_line_end: numpy.ndarray, chosen: numpy.ndarray
) -> numpy.ndarray:
    """Whether the word before the gap is `1.`, `(12.` or `a.` at the start of a line."""
    starts = numpy.where(chosen > 0, gaps.words[chosen - 1], 0)
    lengths = gaps.starts[chosen] - starts
    signs = codes[gaps.starts[chosen] - 2 * (lengths > 1)]
    is_digit = (signs >= ord("0")) & (signs <= ord("9"))
    return is_line_end[chosen - 1] & (lengths <= 4) & (is_digit | (lengths == 2))


def _is_wrapped(
    codes: numpy.ndarray,
    flags: numpy.ndarray,
    gaps: Gaps,
    lines: numpy.ndarray,
    lengths: numpy.ndarray,
) -> numpy.ndarray:
    """Which lines may go on in the next: of a page's width, no list item or ideograph behind."""
    words = gaps.words[lines]
    near = [numpy.minimum(words + step, len(codes) - 1) for step in range(4)]
    first, second, third = (codes[place] for place in near[:3])
    is_white = [(flags[place] & WHITE) != 0 for place in near]
    is_item = numpy.isin(first, _BULLETS) & is_white[1]
    is_item |= _is_label_end(second) & is_white[2]
    is_item |= _is_label_end(third) & is_white[3] & ((second <= ord("9")) | (first == ord("(")))
    is_wide = (first >= EAST_ASIAN) | (codes[gaps.starts[lines] - 1] >= EAST_ASIAN)
    is_page = (lengths >= _SHORTEST_WRAPPED) & (lengths <= _LONGEST_WRAPPED)
    return is_page & ~is_item & ~is_wide


def _is_label_end(codes: numpy.ndarray) -> numpy.ndarray:
    return (codes == ord(".")) | (codes == ord(")"))
