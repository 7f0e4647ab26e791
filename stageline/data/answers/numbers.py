"""Reads clock positions and angles, in digits and words (rules 22 to 26)."""

import re
from typing import Literal

from stageline.data.answers.negation import without_negated
from stageline.data.answers.text import read_answer, without_question

Turn = Literal["clockwise", "counterclockwise"]

_NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_NUMBER = "|".join(("1[0-2]", "0?[1-9]", *reversed(_NUMBERS)))
_CLOCK = re.compile(
    rf"(?<![\w.:-])(?:({_NUMBER})[\s-]*(?:o\s*'?[\s-]*clock\b|[:.]\s*00\b)|(0?0|1[3-9]|2[0-4]):00\b)"
)
_NO_HOUR = re.compile(
    rf"\b(?:half|quarter|minutes?) (?:past|to|before|after)\b|\bbetween\b|\d:(?!00)\d\d|"
    rf"\b(?:{_NUMBER})\s*(?:-|to|or|/)\s*(?:{_NUMBER})\b"
)
# a number without "o'clock" is a position only alone, or after one of these words
_BARE = re.compile(
    rf"(?:(?:\b(?:at|is|toward|towards|about|around|roughly|position|hour|number|the)|^)\s*)"
    rf"({_NUMBER})(?=\s*(?:position|direction|hour|[ap]\.?m\b|[.,;!\n]|$))"
)
_ANGLE = re.compile(r"(?<![\w.])([-+]?\d{1,3})(?:\.0+)?\s*(?:°|degrees?|deg)?(?![\w.]*\d)")
_ANGLE_WORDS = (
    (r"\b(?:a |one )?hundred (?:and )?eighty\b", "180"),
    (r"\btwo[ -]hundred (?:and )?seventy\b", "270"),
    (r"\bthree[ -]hundred (?:and )?sixty\b", "360"),
    (r"\bforty[ -]?five\b", "45"),
    (r"\bninety\b", "90"),
    (r"\bzero\b", "0"),
)
_NOT_TURNED = re.compile(
    r"\b(?:not (?:been )?(?:rotated|turned)|isn't (?:rotated|turned)|no rotation|unrotated|upright)"
)
_UPSIDE_DOWN = re.compile(r"\bupside[\s-]down\b")
_COUNTER = re.compile(r"\b(?:counter|anti)[\s-]*clockwise\b")


def parse_clock(text: str, *, question: str | None = None) -> int | None:
    """A clock position, 1 to 12; None where two are named, or a time that is no full hour."""
    return read_answer(without_question(text, question), _read_clock)


def is_clock(text: str) -> bool:
    """Whether a text is written as a clock position ("3 o'clock", "3:00")."""
    return _CLOCK.search(without_question(text, None)) is not None


def _read_clock(place: str) -> int | None:
    text = without_negated(place)
    if _NO_HOUR.search(text):
        return None
    hours = {_hour(*found.groups()) for found in _CLOCK.finditer(text)}
    if not hours:
        text = text.strip(" .,;:!?\"'()")
        hours = {_hour(found[1], None) for found in _BARE.finditer(text)}
    return hours.pop() if len(hours) == 1 else None


def _hour(word: str | None, of_24: str | None) -> int:
    if of_24 is not None:
        return int(of_24) % 12 or 12  # 15:00 is where 3 is, 0:00 where 12 is
    assert word is not None
    return int(word) if word.isdigit() else _NUMBERS.index(word) + 1


def parse_angle(text: str, *, question: str | None = None) -> int | None:
    """An angle in degrees clockwise, 0 to 359, where just one is named; -90 is 270.

    Args:
        question: an angle without a word for its turn has the one that was asked for.
    """
    asked: Turn = "counterclockwise" if _turn(question or "") == "counterclockwise" else "clockwise"
    return read_answer(without_question(text, question), lambda place: _read_angle(place, asked))


def _read_angle(place: str, asked: Turn) -> int | None:
    text = _NOT_TURNED.sub(" 0 ", place)
    text = without_negated(text)
    for pattern, number in _ANGLE_WORDS:
        text = re.sub(pattern, number, text)
    turn = _turn(text)
    if turn == "both":
        return None
    sign = -1 if (turn or asked) == "counterclockwise" else 1
    angles = {sign * int(found) % 360 for found in _ANGLE.findall(text)}
    if not angles and _UPSIDE_DOWN.search(text):
        return 180
    return angles.pop() if len(angles) == 1 else None


def _turn(text: str) -> Literal["clockwise", "counterclockwise", "both"] | None:
    text = text.lower()
    is_counter = _COUNTER.search(text) is not None
    is_clockwise = re.search(r"\bclockwise\b", _COUNTER.sub(" ", text)) is not None
    if is_counter and is_clockwise:
        return "both"
    return "counterclockwise" if is_counter else "clockwise" if is_clockwise else None
