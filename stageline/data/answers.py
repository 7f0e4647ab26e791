"""Reads answers that a model wrote in free text: yes or no, one of some options, directions.

Pure strings. Each function returns None where the text does not say, which counts as wrong.
"""

import re
from collections.abc import Sequence

_YES = r"(?:true|yes|correct|accurate|yep|yeah)"
_NO = r"(?:false|no|incorrect|inaccurate|untrue|wrong|nope)"
_NEGATION = r"(?:not|n't|never|cannot say it is|hardly)"
# "not true", "isn't really correct", "not at all accurate"
_VERDICT = re.compile(
    rf"(?P<negation>\b{_NEGATION}\s+|n't\s+)?(?:(?:at all|really|quite|entirely|completely|exactly|"
    rf"actually)\s+)?\b(?P<verdict>{_YES}|{_NO})\b"
)
_ECHO = re.compile(r"\b(?:true or false|false or true|yes or no|yes/no|true/false)\b")
_LETTER_ONLY = re.compile(r"\(?([a-z])\)?[.):]?")
_LETTER_FIRST = re.compile(r"(?:\(([a-z])\)|([a-z])[.):])(?=\s|$)")
_LETTER_NAMED = re.compile(
    r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*\(?([a-z])\)?(?=[\s.,:;)]|$)"
)
_LETTER_BRACKETS = re.compile(r"\(([a-z])\)")

_DIRECTIONS = {
    "left": "left leftward leftwards left-hand lefthand",
    "right": "right rightward rightwards right-hand righthand",
    "up": "up upward upwards upper top above over",
    "down": "down downward downwards lower bottom below under underneath beneath",
    "front": "front forward forwards ahead",
    "back": "back backward backwards behind rear",
    "middle": "middle center centre central",
    "clockwise": "clockwise",
    "counterclockwise": "counterclockwise anticlockwise",
    "upright": "upright unrotated",
}
_DIRECTION_OF = {word: name for name, words in _DIRECTIONS.items() for word in words.split()}
_NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_NUMBER = "|".join(("1[0-2]", "0?[1-9]", *reversed(_NUMBERS)))
_CLOCK = re.compile(rf"\b({_NUMBER})\s*(?:o\s*'?\s*clock|:\s*00)\b")
_BARE_NUMBER = re.compile(rf"\b({_NUMBER})\b")
_ANGLE = re.compile(r"(?<![\w.])(-?\d{1,3})(?:\.0+)?\s*(?:°|degrees?|deg)?(?![\w.]*\d)")


def normalize(text: str) -> str:
    """Lower case, single spaces, plain apostrophes, no markup and no outer punctuation."""
    text = text.lower().replace("\u2019", "'").replace("`", "")
    text = re.sub(r"[*_]+", " ", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text.strip(" .,;:!?\"'")


def contains_words(text: str, words: str) -> bool:
    """Whether normalized `words` stand in normalized `text` as whole words."""
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def parse_truth(text: str, *, statement: str | None = None) -> bool | None:
    """What an answer says about a statement: true or false.

    A verdict at the beginning counts, else the last one: "It looks true, but it is false".
    "Not" turns a verdict round. Without a verdict, the statement said again counts as true, and
    with a "not" in it as false.

    Args:
        statement: what was asked about.
    """
    answer = _ECHO.sub(" ", normalize(text))
    verdicts = list(_VERDICT.finditer(answer))
    if verdicts:
        starts = not re.search(r"\w", answer[: verdicts[0].start()])
        verdict = verdicts[0] if starts else verdicts[-1]
        is_yes = re.fullmatch(_YES, verdict["verdict"]) is not None
        return is_yes != (verdict["negation"] is not None)
    if statement is None:
        return None
    return _compare_statement(answer, normalize(statement))


def _compare_statement(answer: str, statement: str) -> bool | None:
    plain, num_negations = re.subn(r"\s*(?:\bnot\b|n't\b)", "", answer)
    if contains_words(plain, statement):
        return num_negations % 2 == 0
    return None


def parse_choice(text: str, choices: Sequence[str]) -> int | None:
    """Which option an answer names: by its letter, by its text, or by words of one direction.

    A letter counts where it can't be a word: alone, "B.", "(B)", "answer is B". It wins over a
    text that contradicts it. Of several options in the text, one that holds the others counts
    ("top left" holds "left"); options after "not" don't.
    """
    answer = normalize(text)
    by_letter = _letter(answer)
    if by_letter is not None:
        return by_letter if by_letter < len(choices) else None
    options = [normalize(choice) for choice in choices]
    if answer in options:
        return options.index(answer)
    named = _named(answer, options)
    said = parse_directions(answer)
    fits = [i for i, option in enumerate(options) if said and parse_directions(option) == said]
    # "upper left" has the word of the option "left", and means the option "top left"
    if len(fits) == 1 and all(parse_directions(options[i]) < said for i in named):
        return fits[0]
    return named[0] if len(named) == 1 else None


def _letter(answer: str) -> int | None:
    alone = _LETTER_ONLY.fullmatch(answer)
    first = _LETTER_FIRST.match(answer)
    found = alone[1] if alone else (first[1] or first[2]) if first else None
    if found is None:
        named = _LETTER_NAMED.findall(answer)
        # "the answer is a cat" has an article
        named = [letter for letter in named if letter != "a" or not _article_follows(answer)]
        found = named[-1] if named else None
    if found is None:
        brackets = set(_LETTER_BRACKETS.findall(answer))
        found = brackets.pop() if len(brackets) == 1 else None
    return ord(found) - ord("a") if found else None


def _article_follows(answer: str) -> bool:
    return re.search(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*a\s+\w", answer) is not None


def _named(answer: str, options: Sequence[str]) -> list[int]:
    """Options that stand in the text and are no part of another one that does."""
    said = _without_negated(answer)
    found = [i for i, option in enumerate(options) if contains_words(said, option)]
    return [
        i
        for i in found
        if not any(j != i and contains_words(options[j], options[i]) for j in found)
    ]


def _without_negated(answer: str) -> str:
    """Takes out what "not" is said of: "not left but right" leaves right."""
    return re.sub(r"\b(?:not|isn't|never)\s+(?:(?:on|in|at|to|the|a|an)\s+)*[\w-]+", " ", answer)


def parse_directions(text: str) -> frozenset[str]:
    """The directions that a text names, under one name each; "not left" names none."""
    answer = _without_negated(normalize(text))
    answer = answer.replace("upside down", "upsidedown").replace("upside-down", "upsidedown")
    answer = re.sub(r"\b(counter|anti)[\s-]+clockwise", r"\1clockwise", answer)
    answer = re.sub(r"\b(left|right)[\s-]hand\b", r"\1", answer)
    answer = re.sub(r"\bon top of\b", "top", answer)
    words = re.findall(r"[a-z]+", answer)
    found = {_DIRECTION_OF[word] for word in words if word in _DIRECTION_OF}
    if "upsidedown" in words:
        found.add("upside down")
    return frozenset(found)


def parse_clock(text: str) -> int | None:
    """A clock position, 1 to 12, in digits or words; the last one where several are named."""
    answer = normalize(text)
    marked = _CLOCK.findall(answer)
    if marked:
        return _number(marked[-1])
    numbers = {_number(match) for match in _BARE_NUMBER.findall(answer)}
    return numbers.pop() if len(numbers) == 1 else None


def is_clock(text: str) -> bool:
    """Whether a text is written as a clock position ("3 o'clock", "3:00")."""
    return _CLOCK.search(normalize(text)) is not None


def _number(word: str) -> int:
    return int(word) if word.isdigit() else _NUMBERS.index(word) + 1


def parse_angle(text: str) -> int | None:
    """An angle in degrees, 0 to 359, where just one is named; -90 is 270."""
    angles = {int(match) % 360 for match in _ANGLE.findall(normalize(text))}
    return angles.pop() if len(angles) == 1 else None
