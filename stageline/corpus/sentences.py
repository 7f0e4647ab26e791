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

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy

from stageline.errors import UserError

# -- arithmetic of rising int64 places, quicker than numpy's own, which does not know they rise ---


def differences(ends: numpy.ndarray) -> numpy.ndarray:
    """Lengths of stretches that follow each other from 0 on."""
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    return lengths


def union(*places: numpy.ndarray) -> numpy.ndarray:
    """All places once, rising."""
    joined = numpy.concatenate(places)
    joined.sort(kind="stable")  # merges the runs that already rise
    is_new = numpy.ones(len(joined), bool)
    numpy.not_equal(joined[1:], joined[:-1], out=is_new[1:])
    return joined[is_new]


# -- what a splitter asks of each character, as bits of one byte a character, for whole texts -----

WHITE = 1  # white space at which a line may be broken: not the no-break spaces
NEWLINE = 2
STOP = 4  # ends a sentence where white space follows
FULL_STOP = 8  # ends a sentence whatever follows
CLOSER = 16  # a quote or bracket that stays with the sentence before it
LOWER = 32  # a small letter
COMMA = 64  # the sentence goes on

_NEWLINES = "\n\v\f\x85\u2028\u2029"
_NO_BREAK = "\xa0\u2007\u202f"
_STOPS = ".!?…‽⁇⁈⁉"
_FULL_STOPS = "。！？｡।॥؟۔።"
_CLOSERS = "\"')]}”’»›）］｝」』】》〉〕〗＂＇｠｣"
_COMMAS = ",;:，；：、､،؛"
# beyond it: ideographs, kana, hangul and their punctuation, written without spaces
EAST_ASIAN = 0x2E80
# characters classed at a time: a table look-up of that many stays in the processor's cache
_TABLE_BLOCK = 1 << 15


def classed(text: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(code point, bits) of each character; code points are bytes where the text is ASCII."""
    if text.isascii():
        raw = text.encode("ascii")
        bits = raw.translate(_table_of_bytes())
        return numpy.frombuffer(raw, numpy.uint8), numpy.frombuffer(bits, numpy.uint8)
    codes = numpy.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    table = _table()
    flags = numpy.empty(len(codes), numpy.uint8)
    for start in range(0, len(codes), _TABLE_BLOCK):
        table.take(
            codes[start : start + _TABLE_BLOCK],
            out=flags[start : start + _TABLE_BLOCK],
            mode="clip",
        )
    return codes, flags


@cache
def _table() -> numpy.ndarray:
    """Bits of each code point of the basic plane; the others (signs, old scripts) have none."""
    table = numpy.zeros(0x10001, numpy.uint8)
    for code in range(0x10000):
        letter = chr(code)
        if letter.isspace() and letter not in _NO_BREAK:
            table[code] |= WHITE
        if letter.islower():
            table[code] |= LOWER
    groups = (_NEWLINES, NEWLINE), (_STOPS, STOP), (_CLOSERS, CLOSER), (_COMMAS, COMMA)
    for letters, bit in (*groups, (_FULL_STOPS, FULL_STOP)):
        table[[ord(letter) for letter in letters]] |= bit
    return table


@cache
def _table_of_bytes() -> bytes:
    return _table()[:256].tobytes()


# -- where sentences end in Chinese and Japanese text, which has no spaces ------------------------

_MOST_CLOSERS = 8
_DOT = ord(".")


def eastern_ends(
    codes: numpy.ndarray, flags: numpy.ndarray, *, is_space_enough: bool
) -> numpy.ndarray:
    """Ends inside the text: behind the last of `。！？` in a row and the quotes that close there.

    `!`, `?` and `…` count where an ideograph follows, and white space if that `is_space_enough`;
    no end goes before a comma (`“好！”，他说`).
    """
    stops = numpy.flatnonzero(flags & (FULL_STOP | STOP))
    stops = stops[(codes[stops] != _DOT) & (stops < len(codes) - 1)]
    is_last = (flags[stops + 1] & (FULL_STOP | STOP)) == 0
    stops = stops[is_last]
    ends = stops + 1
    for _ in range(_MOST_CLOSERS):
        is_closer = (flags[ends] & CLOSER) != 0
        if not is_closer.any():
            break
        ends += is_closer
        numpy.minimum(ends, len(codes) - 1, out=ends)
    behind = flags[ends]
    is_end = (behind & (COMMA | FULL_STOP | STOP | CLOSER)) == 0
    is_full = (flags[stops] & FULL_STOP) != 0
    is_full |= codes[ends] >= EAST_ASIAN
    if is_space_enough:
        is_full |= (behind & WHITE) != 0
    is_end &= is_full
    ends = ends[is_end]
    if len(ends) and (flags[ends[-1] :] & WHITE).all():
        ends = ends[:-1]  # the last sentence keeps the white space behind it
    return ends


# -- texts handed to a splitter in stretches of the size it is quickest with ----------------------
# Short texts are joined by blank lines: one ends a sentence whatever stands on either side, and no
# rule of ours looks past it. Long texts are taken in stretches that end at a newline: to judge the
# gaps behind it the rules need one character before it, to judge itself the first ones of the next
# word.

# places inside the text where sentences end
Finder = Callable[[str], numpy.ndarray]

# characters: less is spent on calls, more on memory that no cache holds
_BLOCK = 1 << 16
_BLANK_LINE = "\n\n"
# of a word behind a newline: `(a) `
_LOOK_AHEAD = 4
_WORD = re.compile(r"\S")


def in_blocks(find: Finder, text: str) -> numpy.ndarray:
    """The ends in a text and the end of the text."""
    if not text:
        return numpy.zeros(0, numpy.int64)
    if len(text) <= 2 * _BLOCK:
        return numpy.append(find(text), len(text))
    found = []
    for start, stop, behind in _blocks(text):
        first = max(start - 1, 0)
        ends = find(text[first:behind])
        ends += first
        found.append(ends[ends.searchsorted(start, "right") : ends.searchsorted(stop, "right")])
    return numpy.concatenate([*found, [len(text)]])


def _blocks(text: str) -> Iterator[tuple[int, int, int]]:
    """(start, stop, how far to look): newlines behind a word, and the first signs of the next."""
    start = 0
    while len(text) - start > 2 * _BLOCK:
        stop = text.find("\n", start + _BLOCK)
        while stop > 0 and text[stop - 1].isspace():
            stop = text.find("\n", stop + 1)
        word = _WORD.search(text, stop) if stop > 0 else None
        if word is None:  # white space to the end: no word behind it, no end before it
            break
        yield start, stop, word.start() + _LOOK_AHEAD
        start = stop
    yield start, len(text), len(text)


def all_at_once(find: Finder, texts: Sequence[str]) -> list[numpy.ndarray]:
    """The ends in each text and its end, in the order of the texts."""
    found: list[numpy.ndarray | None] = [None] * len(texts)
    # apart: one letter that is not ASCII makes all that it is joined to slower
    for is_plain in (True, False):
        chosen = [place for place, text in enumerate(texts) if text.isascii() == is_plain]
        for batch in _batches(texts, chosen):
            ends = _joined(find, [texts[place] for place in batch])
            for place, text_ends in zip(batch, ends, strict=True):
                found[place] = text_ends
    return [ends for ends in found if ends is not None]


def _batches(texts: Sequence[str], chosen: list[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for place in chosen:
        if batch and size + len(texts[place]) > _BLOCK:
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += len(texts[place])
    if batch:
        yield batch


def _joined(find: Finder, texts: list[str]) -> list[numpy.ndarray]:
    if len(texts) == 1:
        return [in_blocks(find, texts[0])]
    whole = in_blocks(find, _BLANK_LINE.join(texts))
    lengths = numpy.array([len(text) for text in texts])
    starts = numpy.cumsum(lengths + len(_BLANK_LINE)) - lengths - len(_BLANK_LINE)
    firsts = whole.searchsorted(starts, "right").tolist()
    behind = whole.searchsorted(starts + lengths, "right").tolist()
    ends = []
    for text, start, first, stop in zip(texts, starts.tolist(), firsts, behind, strict=True):
        inside = whole[first:stop] - start
        if not len(inside):  # white space alone
            inside = numpy.full(min(len(text), 1), len(text))
        elif text:  # the last sentence keeps the white space behind it
            inside[-1] = len(text)
        ends.append(inside)
    return ends


# -- lines that begin with the sign of a list item: `- `, `* `, `1. `, `a) `, `12) `, `(a) ` ------

_BULLETS = "-*+#>|•·◦–—"
_LABEL_ENDS = ".)"
_SPACES = " \t\n\v\f\r"
_DIGITS = "0123456789"
_ANY = None
# what stands in the first four places of each kind of item
_KINDS = (
    (_BULLETS, _SPACES, _ANY, _ANY),
    (_ANY, _LABEL_ENDS, _SPACES, _ANY),
    (_ANY, _DIGITS, _LABEL_ENDS, _SPACES),
    ("(", _ANY, _LABEL_ENDS, _SPACES),
)
# beyond the bullets no sign differs from another
_SIZE = 0x2600
_STEPS = numpy.arange(4)
_SPACE = ord(" ")


def _item_table() -> numpy.ndarray:
    """[place, code]: a bit for each kind that has this code in this place."""
    table = numpy.zeros((4, _SIZE), numpy.uint8)
    for bit, kind in enumerate(_KINDS):
        for place, signs in enumerate(kind):
            codes = slice(None) if signs is None else [ord(sign) for sign in signs]
            table[place, codes] |= 1 << bit
    return table


_TABLE = _item_table()


def is_item(codes: numpy.ndarray, words: numpy.ndarray) -> numpy.ndarray:
    """Which of the words begin a list item.

    Args:
        codes: code point of each character of the text.
        words: places of the first words of lines.
    """
    places = words[:, None] + _STEPS
    near = codes.take(places, mode="clip")
    if len(words) and words[-1] + len(_STEPS) > len(codes):
        near[places >= len(codes)] = _SPACE  # as if a blank line followed the text
    if codes.itemsize > 1:
        near = numpy.minimum(near, _SIZE - 1)
    kinds = _TABLE.take(near + _STEPS * _SIZE)
    return numpy.bitwise_and.reduce(kinds, axis=1) != 0


# -- full stops that end no sentence: `Mr. Smith`, `J. Smith`, `U.S. Army`, `Fig. 3`, `1. Item` ---

# never the last word of a sentence
_TITLES = """
    mr mrs ms dr prof gen col lt capt cmdr sgt gov sen rep hon rev fr mme mlle messrs st mt
    vs cf viz al fig figs eq eqs sec sect ch chap ref refs ed eds vol vols app approx resp ca
""".split()
# only before a number is it an abbreviation: `No. 5`, but `He said no. Then`
_BEFORE_NUMBERS = """
    no nos nr p pp par art jan feb mar apr jun jul aug sep sept oct nov dec col line ver v r
""".split()
_WIDTH = 8
_ABBREVIATION_STEPS = numpy.arange(1, _WIDTH + 1)
_DOT = ord(".")
# stands for letters that are in no abbreviation, and for what joins words
_JOINS = 255


def _folded() -> numpy.ndarray:
    """Byte -> small letter, digit, `.`, or 0 where a word ends."""
    table = numpy.zeros(256, numpy.uint8)
    table[0x80:] = _JOINS
    for sign in "'_-@/\\":
        table[ord(sign)] = _JOINS
    for sign in ".0123456789abcdefghijklmnopqrstuvwxyz":
        table[ord(sign)] = table[ord(sign.upper())] = ord(sign)
    return table


def _keys(words: list[str]) -> list[int]:
    """Words as the eight bytes before their full stop, the nearest one first."""
    rows = [word.encode()[::-1].ljust(_WIDTH, b"\0") for word in words]
    return numpy.frombuffer(b"".join(rows), numpy.uint64).tolist()


_FOLDED = _folded()
# the last one is no word: what is behind all others finds it
_KEYS = numpy.array(sorted({*_keys(_TITLES), *_keys(_BEFORE_NUMBERS), 2**64 - 1}), numpy.uint64)
_IS_TITLE = numpy.isin(_KEYS, _keys(_TITLES))


def is_abbreviation(
    codes: numpy.ndarray, dots: numpy.ndarray, next_words: numpy.ndarray
) -> numpy.ndarray:
    """Which of the full stops belong to a word.

    Args:
        codes: code point of each character.
        dots: places of single full stops.
        next_words: place of the first character of the word behind each.
    """
    places = dots[:, None] - _ABBREVIATION_STEPS
    signs = codes.take(places, mode="clip")
    letters = _FOLDED.take(signs, mode="clip")
    if len(dots) and dots[0] < _WIDTH:
        letters[places < 0] = 0
    nearest, second = letters[:, 0], letters[:, 1]
    # initials are capitals; in `e.g.` and `p.m.` small letters follow a full stop
    is_initial = (second == 0) & _is_within(signs[:, 0], "A", "Z")
    is_initial |= (second == _DOT) & _is_within(nearest, "a", "z")
    letters *= numpy.logical_and.accumulate(letters, axis=1)
    keys = letters.view(numpy.uint64).ravel()
    found = _KEYS.searchsorted(keys)
    is_word = _IS_TITLE.take(found) | _is_within(codes.take(next_words), "0", "9")
    return is_initial | (is_word & (_KEYS.take(found) == keys))


def _is_within(codes: numpy.ndarray, first: str, last: str) -> numpy.ndarray:
    # unsigned: what is below the first wraps round to far above the last
    return codes - codes.dtype.type(ord(first)) <= ord(last) - ord(first)


# -- where sentences end in text with spaces between its words ------------------------------------
# All that is asked here is asked of the gaps between words, as an end goes before white space; and
# by few calls: on a document of some kilobytes they take longer than its characters do.

# a line of so many characters may have been wrapped in the middle of a sentence
_SHORTEST_WRAPPED = 40
_LONGEST_WRAPPED = 120
# `...")` has no more of them in a row that matters
_MOST_WESTERN_CLOSERS = 4
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
        for _ in range(_MOST_WESTERN_CLOSERS):
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


# -------------------------------------------------------------------------------------------------

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
