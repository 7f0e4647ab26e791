"""Finds words of interest in what is learnt, by characters: whole words, the longest first.

Knows neither tokens nor batches; a token is marked where it covers a character of a marked piece.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from stageline.data.rendered import Piece, Rendered
from stageline.errors import UserError

BuiltIn = Literal["directions", "clock", "none"]

_SIDES = "left right front back rear behind ahead above below under over beneath underneath".split()
_PLACES = "up down top bottom upper lower middle center centre".split()
_WAYS = "forward forwards backward backwards upward upwards downward downwards".split()
_TURNS = "leftward leftwards rightward rightwards leftmost rightmost".split()
_WINDS = "north south east west northeast northwest southeast southwest".split()
_FIRST = "upper lower top bottom front back rear".split()
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()


def _directions() -> list[str]:
    compounds = [f"{first} {side}" for first in _FIRST for side in ("left", "right")]
    compounds += [f"{side} {first}" for first in _FIRST for side in ("left", "right")]
    compounds += [f"{ns} {ew}" for ns in ("north", "south") for ew in ("east", "west")]
    return [*_SIDES, *_PLACES, *_WAYS, *_TURNS, *_WINDS, *compounds, "in front"]


def _clock() -> list[str]:
    numbers = [*map(str, range(1, 13)), *(f"0{n}" for n in range(1, 10)), *_NUMBERS]
    return [f"{number} {hour}" for number in numbers for hour in ("o'clock", "oclock", "o clock")]


BUILT_IN: dict[str, list[str]] = {"directions": _directions(), "clock": _clock(), "none": []}

# scripts that write no space between words, or hang endings on them: no boundary is asked there
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"  # kana, Han, Hangul
    "\U00020000-\U0003ffff"  # further Han
)
_SPACED_LETTER = rf"[^\W{_UNSPACED}]"  # of a word, in a script that has spaces
_APOSTROPHES = "'\u2018\u2019\u02bc\uff07"


class MarkedWords:
    """A list of words and phrases.

    Letters match in either case. A space or hyphen in a phrase matches any run of spaces and
    hyphens, so "upper left" finds "upper-left". A word that begins or ends with a letter of a
    script with spaces has to be a whole word there; a Chinese one is found anywhere.

    Args:
        words: a name of `BUILT_IN`, or words; names among them stand for their lists.

    Raises:
        UserError: a word holds no letter or digit.
    """

    def __init__(self, words: BuiltIn | Sequence[str]) -> None:
        given = [words] if isinstance(words, str) else list(words)
        self.words = [word for name in given for word in BUILT_IN.get(name, [name])]
        for word in self.words:
            if not any(character.isalnum() for character in word):
                raise UserError(
                    f"--collate-fn.marked has the word {word!r}. A letter or a digit was expected "
                    f"in each, because words are looked for in the answers: give words, or "
                    f"{', '.join(BUILT_IN)}."
                )
        longest_first = sorted(set(self.words), key=lambda word: (-len(word), word))
        self._pattern = re.compile("|".join(map(_pattern, longest_first)) or "(?!)", re.IGNORECASE)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Character spans of all matches, from left to right; none overlaps another."""
        return (match.span() for match in self._pattern.finditer(text))

    def mark(self, rendered: Rendered) -> Rendered:
        """The same text; matches inside what is learnt are pieces of their own, and marked.

        Neighbouring learnt pieces are read as one text, so a match may cross from one to the next,
        never from the prompt into the answer.
        """
        matches = [
            (start + first, start + last)
            for start, end in _joined(rendered.target_spans())
            for first, last in self.spans(rendered.text[start:end])
        ]
        if not matches:
            return rendered
        return rendered.with_pieces(
            part
            for start, _, piece in rendered.spans()
            for part in (_cut(piece, start, matches) if piece.is_target else [piece])
        )

    def marking(self, image_token: Any) -> Any:
        """An image_token function that also marks; it is the last to touch a rendered sample."""

        def place_and_mark(rendered: Rendered, images: Any, **options: Any) -> Rendered:
            return self.mark(image_token(rendered, images, **options))

        return place_and_mark


def _pattern(word: str) -> str:
    """One word as a pattern; boundaries are asked for where its own edge has them."""
    words = [part for part in re.split(r"[\s\-\u2010-\u2013]+", word) if part]
    escaped = [
        "".join(f"[{_APOSTROPHES}]" if c in _APOSTROPHES else re.escape(c) for c in part)
        for part in words
    ]
    body = r"[\s\-\u2010-\u2013]+".join(escaped)
    first, last = words[0][0], words[-1][-1]
    before = f"(?<!{_SPACED_LETTER})" if re.match(_SPACED_LETTER, first) else ""
    if first.isdigit():  # 1.3 o'clock and 12:3 o'clock are no 3 o'clock
        before += r"(?<!\d[.,:])"
    after = f"(?!{_SPACED_LETTER})" if re.match(_SPACED_LETTER, last) else ""
    return before + body + after


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that touch become one."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _cut(piece: Piece, start: int, matches: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """The piece in parts, those inside a match marked."""
    end, place = start + len(piece.text), start
    for first, last in matches:
        first, last = max(first, start), min(last, end)
        if first >= last:
            continue
        if place < first:
            yield replace(piece, text=piece.text[place - start : first - start])
        yield replace(piece, text=piece.text[first - start : last - start], is_marked=True)
        place = last
    if place < end or not piece.text:
        yield replace(piece, text=piece.text[place - start :])
