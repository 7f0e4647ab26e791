"""Splitters, which find the ends of the sentences of a text.

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
a line that ends with an ideograph, or whose next line begins with one, is not a wrapped one.
`icu` uses the International Components for Unicode (PyICU, `pip install 'stageline[icu]'`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy

from stageline.errors import package

Splitter = Callable[[str], numpy.ndarray]

# white space at which a line may be broken: not the no-break spaces
_NO_BREAK = "\xa0\u2007\u202f"
_WHITE, _NO_WHITE = rf"[^\S{_NO_BREAK}]", rf"[\S{_NO_BREAK}]"
_NEWLINES = "\n\v\f\x85\u2028\u2029"
_STOPS = ".!?…‽⁇⁈⁉"  # end a sentence where white space follows
_FULL_STOPS = "。！？｡।॥؟۔።"  # end a sentence whatever follows
_CLOSERS = re.escape("\"')]}”’»›）］｝」』】》〉〕〗＂＇｠｣")
_COMMAS = ",;:，；：、､،؛"
# beyond it: ideographs, kana, hangul and their punctuation, written without spaces
_EAST_ASIAN = "\u2e80"
_DIGITS = frozenset("0123456789")
# characters of a line that may have been wrapped in the middle of a sentence
_WRAPPED = range(40, 121)

# never the last word of a sentence
_TITLES = frozenset(
    """
    mr mrs ms dr prof gen col lt capt cmdr sgt gov sen rep hon rev fr mme mlle messrs st mt
    vs cf viz al fig figs eq eqs sec sect ch chap ref refs ed eds vol vols app approx resp ca
    """.split()
)
# only before a number is it an abbreviation: `No. 5`, but `He said no. Then`
_BEFORE_NUMBERS = frozenset(
    """
    no nos nr p pp par art jan feb mar apr jun jul aug sep sept oct nov dec col line ver v r
    """.split()
)
_LONGEST_ABBREVIATION = 8
_LONGEST_LABEL = 4

_FIRST_WORD = re.compile(_NO_WHITE)
_LAST_WORD = re.compile(rf"{_NO_WHITE}*\Z")
_NEWLINE = re.compile(rf"[{_NEWLINES}]{_WHITE}*")
_STOP = re.compile(rf"([{_STOPS}])([{_CLOSERS}]{{0,4}}){_WHITE}+")
# A word includes the signs that join words: the last letter of `x-ray.` is not an initial.
_ABBREVIATION = re.compile(r"[0-9A-Za-z.'_\-@/\\\x80-\U0010ffff]*\Z")
# `- `, `* `, `1. `, `a) `, `12) `, `(a) `
_ITEM = re.compile(r"(?:[-*+#>|•·◦–—]|.[.)]|.[0-9][.)]|\(.[.)])(?:[ \t\n\v\f\r]|\Z)", re.DOTALL)
_EASTERN_STOP = re.compile(
    rf"([{_STOPS[1:]}{_FULL_STOPS}])(?![{_STOPS}{_FULL_STOPS}])[{_CLOSERS}]{{0,8}}"
    rf"(?=([^{_STOPS}{_FULL_STOPS}{_CLOSERS}{_COMMAS}]))"
)


def english(text: str) -> numpy.ndarray:
    """Sentences of text with spaces between its words."""
    return _inside(text, _western(text))


def chinese(text: str) -> numpy.ndarray:
    """Sentences of Chinese and Japanese text; each line is at least one."""
    lines = {start for start, _, _ in _line_ends(text)}
    return _inside(text, lines.union(_eastern(text, is_space_enough=True)))


def auto(text: str) -> numpy.ndarray:
    """Sentences of text in any script; mixed text gets the rules of both."""
    if text.isascii():
        return english(text)
    return _inside(text, _western(text).union(_eastern(text, is_space_enough=False)))


def icu(text: str) -> numpy.ndarray:
    """Sentences by the rules of Unicode, with the English abbreviations that ICU knows."""
    breaks = _icu_iterator()
    breaks.setText(text)
    codes = numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    units = numpy.cumsum(1 + (codes > 0xFFFF))  # ICU counts in UTF-16
    places, before = set(), 0
    for end in (units.searchsorted(numpy.fromiter(breaks, numpy.int64)) + 1).tolist():
        start = _before_white(text, end, least=before)
        if start > before:  # else it is only white space
            places.add(start)
        before = end
    return _inside(text, places)


@cache
def _icu_iterator() -> Any:
    user = "the splitter `icu` (PyICU, on libicu-dev)"
    icu = package("icu", user, pip="'stageline[icu]'", instead="use `auto`")
    return icu.BreakIterator.createSentenceInstance(icu.Locale("en@ss=standard"))


def _inside(text: str, places: Iterable[int]) -> numpy.ndarray:
    """Return the places that have a word on both sides, rising, and the end of the text."""
    first = _FIRST_WORD.search(text)
    low = first.start() if first else len(text)
    high = _before_white(text, len(text))
    ends = sorted(place for place in places if low < place < high)
    return numpy.array([*ends, len(text)] if text else [], numpy.int64)


def _before_white(text: str, end: int, *, least: int = 0) -> int:
    """Return the start of the white space before `end`, at least `least`."""
    while end > least and _is_white(text[end - 1]):
        end -= 1
    return end


def _is_white(sign: str) -> bool:
    return sign.isspace() and sign not in _NO_BREAK


def _western(text: str) -> set[int]:
    """Return ends in text with spaces between its words; see the rules of `english`."""
    first = _FIRST_WORD.search(text)
    ends, line_words = set(), {first.start() if first else 0}
    for start, word, is_wrapped in _line_ends(text):
        line_words.add(word)
        if not is_wrapped:
            ends.add(start)
    for match in _STOP.finditer(text):
        (sign, closers), end, word = match.groups(), match.end(2), match.end()
        if word == len(text):
            break
        # `Why? because`, but `"Why?" he asked` and `and ... then` are one sentence
        is_bare = not closers and sign not in ".…"
        if text[word].islower() and not is_bare:
            continue
        if sign == "." and _belongs_to_word(text, match.start(), end, word, line_words):
            continue
        ends.add(end)
    return ends


def _line_ends(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (start of its white space, next word, whether it is wrapped) of each end of a line."""
    line_start = 0
    for match in _NEWLINE.finditer(text):
        # from the newline backwards: a pattern would look at long white space again and again
        start, word = _before_white(text, match.start(), least=line_start), match.end()
        newlines = [place for place, sign in enumerate(match[0]) if sign in _NEWLINES]
        is_page = len(newlines) == 1 and start - line_start in _WRAPPED and word < len(text)
        is_wrapped = is_page and not (
            _ITEM.match(text, word) or max(text[start - 1], text[word]) >= _EAST_ASIAN
        )
        yield start, word, is_wrapped
        line_start = match.start() + newlines[-1] + 1


def _belongs_to_word(text: str, dot: int, end: int, word: int, line_words: set[int]) -> bool:
    """Return whether a full stop is of an abbreviation, an initial, or the label of a list item.

    Args:
        end: place behind the signs that close at the full stop at `dot`.
        word: where the next word begins; `line_words`: where the first words of lines begin.
    """
    before = _ABBREVIATION.search(text, max(0, dot - _LONGEST_ABBREVIATION), dot)
    assert before is not None  # it may be empty
    if re.fullmatch(r"[A-Z]|.*\.[A-Za-z]", before[0]):
        return True
    name = before[0].lower()
    if name in _TITLES or (name in _BEFORE_NUMBERS and text[word] in _DIGITS):
        return True
    last = _LAST_WORD.search(text, max(0, end - _LONGEST_LABEL - 1), end)
    assert last is not None
    size = end - last.start()
    is_label = size == 2 or (2 < size <= _LONGEST_LABEL and text[end - 2] in _DIGITS)
    return is_label and last.start() in line_words


def _eastern(text: str, *, is_space_enough: bool) -> Iterator[int]:
    """Yield ends inside the text: behind the last of `。！？` in a row, with closing quotes.

    `!`, `?` and `…` count where an ideograph follows, and white space if that `is_space_enough`;
    no end goes before a comma (`“好！”，他说`).
    """
    for match in _EASTERN_STOP.finditer(text):
        sign, behind = match.groups()
        is_white = is_space_enough and _is_white(behind)
        if sign in _FULL_STOPS or behind >= _EAST_ASIAN or is_white:
            yield match.end()
