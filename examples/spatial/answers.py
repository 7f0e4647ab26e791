"""Read answers that a model wrote in free text: yes or no, an option, directions, clock, angle.

Pure strings. Each function returns None (directions: nothing) where the text does not say, which
counts as wrong. The rules are numbered in docs/metrics.md: 8 is what a text denies, 10 to 13 yes
and no, 14 to 17 options, 18 to 21 directions, 22 to 26 clock positions and angles.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from examples.spatial import answer_text
from examples.spatial.answer_text import (
    clean,
    named_options,
    read_answer,
    without_negated,
    without_question,
    without_refusals,
)
from stageline.inference.answer_text import contains_words, tidy

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
# these words mean a direction too, and are rewritten before words are looked up
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
    """Return the directions that a text names, under one name each; empty where it names none.

    "Not left" names none, "left or right" neither, and opposites of one answer cancel it.
    """
    return read_answer(without_question(text, question), _read_directions) or frozenset()


def _read_directions(place: str) -> frozenset[str] | None:
    text = without_negated(place)
    for pattern, word in _OTHER_MEANINGS:
        text = pattern.sub(word, text)
    tokens = re.findall(r"[a-z]+|/", text)
    found = frozenset(_DIRECTION_OF[token] for token in tokens if token in _DIRECTION_OF)
    if not found or _is_undecided(tokens) or any(found.issuperset(pair) for pair in _OPPOSITES):
        return None
    return found


def _is_undecided(tokens: list[str]) -> bool:
    """Return whether two directions are joined by "or", with nothing but fillers between."""
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
    """Return a clock position, 1 to 12; None if two are named, or a time between full hours."""
    return read_answer(without_question(text, question), _read_clock)


def is_clock(text: str) -> bool:
    """Return whether a text is written as a clock position ("3 o'clock", "3:00")."""
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
    """Return the only angle that is named, in degrees clockwise, 0 to 359; -90 is 270.

    Args:
        question: its turn is used for an angle that names none.
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


_YES = (
    r"(?:true|yes|correct|accurate|yep|yeah|yup|affirmative|indeed|certainly|absolutely|definitely|"
    r"of course|right)"
)
_NO = r"(?:false|no|incorrect|inaccurate|untrue|wrong|nope|negative|nah|the opposite)"
_NEGATION = r"(?:not|never|hardly)"
_BETWEEN = r"(?:(?:at all|really|quite|entirely|completely|exactly|actually|necessarily|a|the)\s+)*"
# "not true", "isn't really correct", "not at all accurate"
_VERDICT = re.compile(
    rf"(?P<negation>(?:\b{_NEGATION}|n't|cannot)\s+(?:be\s+)?)?{_BETWEEN}\b(?P<verdict>{_YES}|{_NO})\b"
    r"(?P<denied>\s+not\b)?"
)
_NOT_THE_CASE = re.compile(r"\b(?:is|'s)(?P<negation> not|n't) the case\b|\bis the case\b")
# words that are verdicts only at the beginning, or by themselves
_LEADING = re.compile(
    r"no|right|wrong|negative|indeed|certainly|absolutely|definitely|of course|the opposite"
)
_BOTH = re.compile(
    r"\b(?:true|yes|correct)\s*(?:or|and|/|nor)\s*(?:false|no|incorrect|not)\b|"
    r"\b(?:false|no|incorrect)\s*(?:or|and|/|nor)\s*(?:true|yes|correct)\b|"
    r"^\W*yes\W+no\W*$|^\W*no\W+yes\W*$"
)
_IS_RIGHT = re.compile(
    r"\b((?:that|this|it|you|statement|caption)(?:'s|'re| is| are)(?: not|n't)?) right\b"
    r"(?=[.,;!]|$)"
)
_THINK_SO = re.compile(r"\bi (?:do(?P<negation>n't| not) )?(?:think|believe) so\b")
_NO_DOUBT = re.compile(r"\bno doubt\b|\bwithout (?:a )?doubt\b|\bno (?:problem|question)\b")
_ALONE = {"1": True, "0": False, "y": True, "n": False, "t": True, "f": False}
_SHORT = re.compile(
    r"(?:(?:it|they|he|she|this|that|there|the [\w-]+|this [\w-]+)\s+)?"
    r"(?:is|are|does|do|was|were|has|have|can|did)(?P<negation>\s*not|n't)?"
)
_NOT_ONLY = re.compile(r"not(?: at all| really| quite| exactly)?")


def parse_truth(
    text: str, *, statement: str | None = None, question: str | None = None
) -> bool | None:
    """Return whether an answer calls a statement true or false; None if neither.

    A verdict at the beginning counts, else the last one: "It looks true, but it is false".
    "Not" turns a verdict round. Without a verdict, the statement said again counts as true, and
    with a "not" in it as false.

    Args:
        statement: what was asked about.
        question: left out where the answer begins with it.
    """
    said = without_question(text, question)
    found = read_answer(said, _read_truth, is_verdict=True)
    if found is not None or statement is None:
        return found
    return _compare_statement(tidy(without_refusals(said)), tidy(clean(statement)))


def _read_truth(place: str) -> bool | None:
    place = _THINK_SO.sub(lambda found: "no" if found["negation"] else "yes", place)
    words = _IS_RIGHT.sub(r"\1 correct", _NO_DOUBT.sub(" ", _BOTH.sub(" ", place)))
    words = re.sub(r"\s+", " ", words).strip(" .,;:!?\"'()-")
    if words in _ALONE:
        return _ALONE[words]
    if _NOT_ONLY.fullmatch(words):
        return False
    short = _SHORT.fullmatch(words)
    if short:
        return short["negation"] is None
    case = _NOT_THE_CASE.search(words)
    if case:
        return case["negation"] is None
    return _verdict(words)


def _verdict(words: str) -> bool | None:
    found = list(_VERDICT.finditer(words))
    if not found:
        return None
    starts = not re.search(r"\w", words[: found[0].start()])
    if not starts:
        found = [item for item in found if not _LEADING.fullmatch(item["verdict"])] or found
        found = [item for item in found if item["verdict"] != "right" or item["negation"]]
    if not found:
        return None
    verdict = found[0] if starts else found[-1]
    if starts and _contradicts(verdict, words):
        return None
    return _is_yes(verdict)


def _is_yes(verdict: re.Match[str]) -> bool:
    is_yes = re.fullmatch(_YES, verdict["verdict"]) is not None
    return is_yes != (verdict["negation"] is not None or verdict["denied"] is not None)


def _contradicts(first: re.Match[str], words: str) -> bool:
    """Return whether a later verdict on the statement says the other: "yes, the claim is false"."""
    later = re.search(
        r"\b(?:statement|caption|claim|sentence|description)\s+is(?P<rest>n't.*|\s.*)", words
    )
    if later is None or first["verdict"] not in ("yes", "no"):
        return False
    verdict = _VERDICT.search(f"is{later['rest']}")
    return verdict is not None and _is_yes(verdict) != _is_yes(first)


def _compare_statement(answer: str, statement: str) -> bool | None:
    plain, num_negations = re.subn(r"\s*(?:\bnot\b|n't\b)", "", answer)
    if contains_words(plain, statement):
        return num_negations % 2 == 0
    return None


def parse_choice(text: str, choices: Sequence[str], *, question: str | None = None) -> int | None:
    """Call `answer_text.parse_choice`, with verdicts, clocks, angles and directions by meaning."""
    return answer_text.parse_choice(text, choices, question=question, read=_by_meaning)


def _by_meaning(said: str, place: str, options: Sequence[str]) -> int | None:
    truths = [parse_truth(option) for option in options]
    if sorted(truths, key=str) == [False, True]:
        verdict = parse_truth(place)
        return None if verdict is None else truths.index(verdict)
    named = named_options(said, options)
    if said.strip(" .,;:!?\"'()\n") in options:
        return named[0]
    if all(map(is_clock, options)):
        return _only(options, parse_clock(place), parse_clock)
    angles = [parse_angle(option) for option in options]
    if None not in angles and len(set(angles)) == len(options):
        return _only(options, parse_angle(place), parse_angle)
    directions = parse_directions(place)
    fits = [
        index
        for index, option in enumerate(options)
        if directions and parse_directions(option) == directions
    ]
    # "upper left" has the word of the option "left", and means the option "top left"
    if len(fits) == 1 and all(parse_directions(options[i]) < directions for i in named):
        return fits[0]
    return named[0] if len(named) == 1 else None


def _only(
    options: Sequence[str], said: int | None, parse: Callable[[str], int | None]
) -> int | None:
    fits = [i for i, option in enumerate(options) if said is not None and parse(option) == said]
    return fits[0] if len(fits) == 1 else None
