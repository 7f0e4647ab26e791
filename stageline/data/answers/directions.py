"""Reads directions and their synonyms (rules 18 to 21)."""

import re

from stageline.data.answers.negation import without_negated
from stageline.data.answers.text import read_answer, without_question

_DIRECTIONS = {
    "left": "left leftward leftwards lefthand leftmost",
    "right": "right rightward rightwards righthand rightmost",
    "up": "up upward upwards upper uppermost top topmost above over overhead atop",
    "down": "down downward downwards lower lowermost bottom bottommost below under underneath "
    "beneath",
    "front": "front frontward forward forwards ahead frontmost",
    "back": "back backward backwards behind rear rearmost",
    "middle": "middle center centre central",
    "north": "north northern northward northwards",
    "south": "south southern southward southwards",
    "east": "east eastern eastward eastwards",
    "west": "west western westward westwards",
    "clockwise": "clockwise",
    "counterclockwise": "counterclockwise anticlockwise",
    "upright": "upright unrotated",
    "upside down": "upsidedown",
}
_DIRECTION_OF = {word: name for name, words in _DIRECTIONS.items() for word in words.split()}
_OPPOSITES = (
    *(("left", "right"), ("up", "down"), ("front", "back"), ("north", "south"), ("east", "west")),
    *(("clockwise", "counterclockwise"), ("upright", "upside down")),
)
# what the words of a direction mean elsewhere; rewritten before words are looked up
_OTHER_MEANINGS = tuple(
    (re.compile(pattern), word)
    for pattern, word in (
        (r"\bupside[\s-]down\b", "upsidedown"),
        (r"\bright[\s-]side[\s-]up\b|\bthe right way up\b", "upright"),
        (r"\b(counter|anti)[\s-]+clockwise\b", r"\1clockwise"),
        (r"\b(left|right)[\s-]+hand\b", r"\1"),
        (r"\bon top of\b", "top"),
        (r"\b(north|south)[\s-]?(east|west)", r"\1 \2"),
        (r"\b(?:that|you)(?:'s|'re| is| are) right\b(?=[,.;!]|$)", " "),
        (r"\b(?:all|just) right\b|\balright\b", " "),
        (r"\bright (?=answer|choice|option|away|now|there|here|next|beside|at|in the middle|in fr"
         r"ont|on top|behind|above|below|under|over|beneath|underneath)", " "),
        (r"\bleft over\b|\bover (?:there|here)\b", " "),
    )
)  # fmt: skip
_FILLERS = frozenset(
    "on to the in its his her their at side slightly towards toward of it is a more".split()
)


def parse_directions(text: str, *, question: str | None = None) -> frozenset[str]:
    """The directions that a text names, under one name each; empty where it names none.

    "Not left" names none, "left or right" neither, and opposites of one answer cancel it.
    """
    return read_answer(without_question(text, question), _read) or frozenset()


def _read(place: str) -> frozenset[str] | None:
    text = without_negated(place)
    for pattern, word in _OTHER_MEANINGS:
        text = pattern.sub(word, text)
    tokens = re.findall(r"[a-z]+|/", text)
    found = frozenset(_DIRECTION_OF[token] for token in tokens if token in _DIRECTION_OF)
    if not found or _is_undecided(tokens) or any(found.issuperset(pair) for pair in _OPPOSITES):
        return None
    return found


def _is_undecided(tokens: list[str]) -> bool:
    """Whether two directions are joined by "or", with nothing but fillers between."""
    last, saw_or = None, False
    for token in tokens:
        if token in _DIRECTION_OF:
            if saw_or and last not in (None, _DIRECTION_OF[token]):
                return True
            last, saw_or = _DIRECTION_OF[token], False
        elif token in ("or", "/"):
            saw_or = last is not None
        elif token not in _FILLERS:
            last, saw_or = None, False
    return False
