"""Where sentences end in text with spaces between its words.

All that is asked here is asked of the gaps between words, as an end goes before white space; and
by few calls: on a document of some kilobytes they take longer than its characters do.
"""

from dataclasses import dataclass

import numpy

from stageline.corpus.abbreviations import is_abbreviation
from stageline.corpus.characters import CLOSER, EAST_ASIAN, LOWER, NEWLINE, STOP, WHITE
from stageline.corpus.list_items import is_item

# a line of so many characters may have been wrapped in the middle of a sentence
_SHORTEST_WRAPPED = 40
_LONGEST_WRAPPED = 120
# `...")` has no more of them in a row that matters
_MOST_CLOSERS = 4
_DOT = ord(".")
_ELLIPSIS = ord("…")


@dataclass(frozen=True)
class Gaps:
    """The white space between words, int64.

    Attributes:
        starts: where the white space of each begins.
        words: where the word behind it begins.
        first_word: where the first word begins.
    """

    starts: numpy.ndarray
    words: numpy.ndarray
    first_word: int


@dataclass(frozen=True)
class Lines:
    """The gaps in which a line ends.

    Attributes:
        gaps: int64, their numbers.
        is_blank: whether a blank line follows.
        lengths: int64, characters of the line before.
    """

    gaps: numpy.ndarray
    is_blank: numpy.ndarray
    lengths: numpy.ndarray


def find_gaps(flags: numpy.ndarray) -> Gaps:
    """White space before the first word and behind the last one is no gap."""
    white = flags & WHITE
    flips = numpy.flatnonzero(white[1:] != white[:-1])
    flips += 1
    first = int(white[0])
    words = flips[first + 1 :: 2]
    return Gaps(flips[first::2][: len(words)], words, int(flips[0]) if first and len(flips) else 0)


def find_lines(flags: numpy.ndarray, gaps: Gaps) -> Lines:
    """Newlines before the first word and behind the last one end no line."""
    newlines = numpy.flatnonzero(flags & NEWLINE)
    places = gaps.starts.searchsorted(newlines, "right")
    num_before = int(places.searchsorted(1))
    num_inside = int(newlines.searchsorted(gaps.words[-1])) if len(gaps.words) else num_before
    places = places[num_before:num_inside]
    is_first = numpy.ones(len(places) + 1, bool)
    numpy.not_equal(places[1:], places[:-1], out=is_first[1:-1])
    bounds = numpy.flatnonzero(is_first)
    if len(bounds) < 2:
        return Lines(bounds[:0], is_first[:0], bounds[:0])
    firsts = bounds[:-1]
    chosen = places.take(firsts)
    chosen -= 1
    before = newlines.take(firsts + (num_before - 1))
    if not num_before:
        before[0] = -1
    return Lines(chosen, bounds[1:] - firsts > 1, gaps.starts.take(chosen) - before - 1)


def western_ends(codes: numpy.ndarray, flags: numpy.ndarray) -> numpy.ndarray:
    """Ends inside the text; see `stageline.corpus.sentences` for the rules."""
    gaps = find_gaps(flags)
    if not len(gaps.starts):
        return gaps.starts
    lines = find_lines(flags, gaps)
    is_end = numpy.zeros(len(gaps.starts) + 1, bool)
    is_end[lines.gaps] = True
    is_end[-1] = True  # the line before the first word ends, so to say
    stops = _stops(codes, flags, gaps, is_end)
    is_end[lines.gaps[_is_wrapped(codes, gaps, lines)]] = False
    is_end[stops] = True
    return gaps.starts[is_end[:-1]]


def _stops(
    codes: numpy.ndarray, flags: numpy.ndarray, gaps: Gaps, is_line_end: numpy.ndarray
) -> numpy.ndarray:
    """Gaps behind a full stop, exclamation or question mark that ends a sentence."""
    before = flags.take(gaps.starts - 1)
    chosen = numpy.flatnonzero(before & (STOP | CLOSER))
    ends = gaps.starts.take(chosen)
    stops = _behind_closers(flags, ends - 1, numpy.flatnonzero(before.take(chosen) & CLOSER))
    kept = numpy.flatnonzero(flags.take(stops) & STOP)
    chosen, ends, stops = chosen.take(kept), ends.take(kept), stops.take(kept)
    signs, words = codes.take(stops), gaps.words.take(chosen)
    # `Why? because`, but `"Why?" he asked` and `and ... then` are one sentence
    is_bare = (stops + 1 == ends) & (signs != _DOT) & (signs != _ELLIPSIS)
    is_end = ((flags.take(words) & LOWER) == 0) | is_bare
    dots = numpy.flatnonzero(is_end & (signs == _DOT))
    belongs = is_abbreviation(codes, stops.take(dots), words.take(dots))
    belongs |= _is_label(codes, gaps, is_line_end, chosen.take(dots))
    is_end[dots] = ~belongs
    return chosen[is_end]


def _behind_closers(
    flags: numpy.ndarray, stops: numpy.ndarray, closed: numpy.ndarray
) -> numpy.ndarray:
    """Moves those places that have a closing sign to the sign before it."""
    if len(closed):
        places = stops.take(closed)
        for _ in range(_MOST_CLOSERS):
            places -= (flags.take(places, mode="clip") & CLOSER) != 0
        stops[closed] = numpy.maximum(places, 0)
    return stops


def _is_label(
    codes: numpy.ndarray, gaps: Gaps, is_line_end: numpy.ndarray, chosen: numpy.ndarray
) -> numpy.ndarray:
    """Whether the word before the gap is `1.`, `(12.` or `a.` at the start of a line."""
    is_label = is_line_end[chosen - 1]
    firsts = numpy.flatnonzero(is_label)
    for place in firsts.tolist():
        gap = int(chosen[place])
        start = int(gaps.words[gap - 1]) if gap else gaps.first_word
        end = int(gaps.starts[gap])
        is_digit = 0 <= int(codes[max(end - 2, 0)]) - ord("0") <= 9
        is_label[place] = end - start <= 4 and (is_digit or end - start == 2)
    return is_label


def _is_wrapped(codes: numpy.ndarray, gaps: Gaps, lines: Lines) -> numpy.ndarray:
    """Which lines may go on in the next: of a page's width, no list item or ideograph behind."""
    is_page = (lines.lengths >= _SHORTEST_WRAPPED) & (lines.lengths <= _LONGEST_WRAPPED)
    is_page &= ~lines.is_blank
    chosen = numpy.flatnonzero(is_page)
    if len(chosen):
        at = lines.gaps.take(chosen)
        ends_here = is_item(codes, gaps.words.take(at))
        if codes.itemsize > 1:
            ends_here |= codes.take(gaps.starts.take(at) - 1) >= EAST_ASIAN
            ends_here |= codes.take(gaps.words.take(at)) >= EAST_ASIAN
        is_page[chosen] = ~ends_here
    return is_page
