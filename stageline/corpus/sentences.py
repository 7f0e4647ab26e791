"""Splitters: where the sentences of a text end.

A splitter takes a text and gives int64 character offsets, rising, the last one the length of the
text, none for an empty text. An end goes before white space: white space starts the next sentence
(as tokens begin with their space), and behind the last word belongs to the last one.

`english` ends a sentence at
- `.`, `!`, `?`, `…` and the quotes and brackets that close behind it, if white space follows; but
  not before a small letter (only a bare `!` or `?` ends one there), behind an abbreviation, an
  initial or the label of a list item (`Mr.`, `e.g.`, `U.S.`, `Fig.`, `No. 5`, `1.`);
- a blank line, and the end of each line that cannot have been wrapped: shorter than 40 characters
  or longer than 120, or with a list item behind it.

`chinese` ends one behind `。！？`, `!`, `?`, `……` with what closes there, and at each newline.
`auto` takes the rules of `english`, and in a text that is not plain ASCII those of `chinese` too;
a line that ends or goes on with an ideograph is not taken for a wrapped one.
`icu` asks the International Components for Unicode (PyICU, `pip install 'stageline[icu]'`).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy

from stageline.corpus.blocks import all_at_once, in_blocks
from stageline.corpus.characters import WHITE, classed
from stageline.corpus.eastern_sentences import eastern_ends
from stageline.corpus.rising import union
from stageline.corpus.western_sentences import find_gaps, find_lines, western_ends
from stageline.errors import UserError

Splitter = Callable[[str], numpy.ndarray]


def english(text: str) -> numpy.ndarray:
    """Sentences of text with spaces between its words."""
    return in_blocks(_english, text)


def chinese(text: str) -> numpy.ndarray:
    """Sentences of Chinese and Japanese text; each line is at least one."""
    return in_blocks(_chinese, text)


def auto(text: str) -> numpy.ndarray:
    """Sentences of text in any script; mixed text gets the rules of both."""
    return in_blocks(_auto, text)


def _english(text: str) -> numpy.ndarray:
    return western_ends(*classed(text))


def _chinese(text: str) -> numpy.ndarray:
    codes, flags = classed(text)
    gaps = find_gaps(flags)
    lines = gaps.starts[find_lines(flags, gaps).gaps]
    return union(lines, eastern_ends(codes, flags, is_space_enough=True))


def _auto(text: str) -> numpy.ndarray:
    codes, flags = classed(text)
    ends = western_ends(codes, flags)
    if codes.itemsize == 1:
        return ends
    return union(ends, eastern_ends(codes, flags, is_space_enough=False))


# splitters whose rules look at nothing beyond a blank line
_OURS = {english: _english, chinese: _chinese, auto: _auto}


def ends_of_each(splitter: Splitter, texts: Sequence[str]) -> list[numpy.ndarray]:
    """What the splitter says of each text; quicker than one by one where texts are short."""
    bare = splitter
    while isinstance(bare, partial) and not (bare.args or bare.keywords):
        bare = bare.func
    find = next((find for ours, find in _OURS.items() if ours is bare), None)
    return [splitter(text) for text in texts] if find is None else all_at_once(find, texts)


def icu(text: str) -> numpy.ndarray:
    """Sentences by the rules of Unicode, with the English abbreviations that ICU knows."""
    if not text:
        return numpy.zeros(0, numpy.int64)
    breaks = _icu_iterator()
    breaks.setText(text)
    ends = numpy.fromiter(breaks, numpy.int64)
    codes, flags = classed(text)
    if codes[codes.argmax()] > 0xFFFF:  # ICU counts UTF-16 units
        units = numpy.cumsum(1 + (codes > 0xFFFF))
        ends = units.searchsorted(ends) + 1
    return _before_white(ends, flags)


@cache
def _icu_iterator():
    try:
        from icu import BreakIterator, Locale
    except ImportError as error:
        raise UserError(
            "the splitter `icu` needs PyICU, which is not installed here: "
            "pip install 'stageline[icu]' (it wants libicu-dev), or take `auto`"
        ) from error
    return BreakIterator.createSentenceInstance(Locale("en@ss=standard"))


def _before_white(ends: numpy.ndarray, flags: numpy.ndarray) -> numpy.ndarray:
    """Moves ends that lie behind white space to where it begins."""
    starts = find_gaps(flags).starts
    is_behind = (flags[ends - 1] & WHITE) != 0
    places = starts.searchsorted(ends, "left") - 1
    # white space before the first word is no gap, and ends no sentence
    is_kept = ~is_behind | (places >= 0)
    moved = numpy.where(is_behind, starts[places] if len(starts) else 0, ends)[is_kept]
    return union(moved[moved < len(flags)], numpy.array([len(flags)]))
