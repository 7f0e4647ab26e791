"""Score one answer, for rewards and metrics. Plain texts and numbers; no text is executed."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import regex  # transformers brings it; unlike re it can be given a time limit

from stageline.errors import DataError, UserError
from stageline.inference.answer_text import normalize, parse_choice

Sample = Mapping[str, Any]
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S | re.I)
_THOUGHT = re.compile(r".*</think>", re.S | re.I)
# a hyphen after a word or a number is not a sign: "10-15" ends with 15
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"
    r"(?:(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)|\d{1,41})(?:\.\d{0,40})?|\.\d{1,40})"
    r"(?:e[-+]?\d{1,3})?(?:/\d{1,40})?(?:[ \xa0]?\\?(%))?",
    re.I,
)
PATTERN_SECONDS = 0.2  # timeout of a pattern: its search in a long answer could take hours


def _name(sample: Sample) -> object:
    return sample.get("source") or sample.get("id")


def said(completion: str) -> str:
    """Return the final answer of a text: in its last <answer> tag, else after its thoughts."""
    tagged = _ANSWER.findall(completion)
    return tagged[-1].strip() if tagged else _THOUGHT.sub("", completion).strip()


def references(sample: Sample) -> list[str]:
    """Return the right answers; for messages, the last turn if it is the assistant's."""
    told, messages = sample.get("answers") or sample.get("answer"), sample.get("messages")
    if told is None and messages and messages[-1].get("role") == "assistant":
        told = messages[-1].get("content")
        if isinstance(told, list):
            told = "".join(part.get("text", "") for part in told)
        told = told or None
    told = told if isinstance(told, list | tuple) else [] if isinstance(told, dict) else [told]
    found = [str(one) for one in told if one is not None]
    if not found:
        raise DataError(
            f"sample {_name(sample)} has neither `answer` nor a list of `answers`, nor messages "
            "that end with the assistant's. Add the field, or choose metrics that need none."
        )
    return found


def is_answer(completion: str, sample: Sample) -> bool:
    """Return whether an answer is exactly the right one, up to case and punctuation."""
    return normalize(said(completion)) in [normalize(one) for one in references(sample)]


def number_in(text: str) -> Fraction | None:
    """Return the last number of a text; 1,200.5, 3/4, 40% and 1e-3 are numbers."""
    for found in reversed(list(_NUMBER.finditer(text[-4000:].replace("\u2212", "-")))):
        whole, _, below = found[0].rstrip("% \xa0\\").replace(",", "").partition("/")
        try:
            value = Fraction(whole) / Fraction(below or 1)
        except (ValueError, ZeroDivisionError):
            continue
        return value / 100 if found[1] else value
    return None


def is_near(completion: str, sample: Sample, *, tolerance: float, is_relative: bool) -> bool | None:
    """Return whether the last number of an answer is close to a right one; None: no number."""
    value = number_in(said(completion))
    if value is None:
        return None
    for reference in references(sample):
        right = number_in(reference)
        if right is None:
            name = _name(sample)
            raise DataError(f"sample {name}: the answer {reference!r} has no number. Correct it.")
        most = Fraction(tolerance) * (abs(right) if is_relative else 1)
        if abs(value - right) <= most:
            return True
    return False


def right_choice(sample: Sample, *, read: Callable[..., int | None] = parse_choice) -> int:
    """Return the place of the right one of a sample's `choices`.

    It is `answer_index`, or `answer` by its text, as a place itself, or by its letter.

    Args:
        read: text, choices -> the place of the choice that the text names.
    """
    choices = list(map(str, sample.get("choices") or ()))
    if not choices:
        raise DataError(f"sample {_name(sample)} has no list of `choices`. Add the field.")
    right: Any = sample.get("answer_index")
    answer = (sample.get("answers") or [sample.get("answer")])[0]
    if right is None and answer is not None:
        text = str(answer)
        right = choices.index(text) if text in choices else answer
        right = right if type(right) is int else read(text, choices)
    place = str(right).removesuffix(".0")  # a table with gaps has floats
    if not place.isdecimal() or int(place) >= len(choices):
        raise DataError(
            f"sample {_name(sample)}: the answer {answer!r} (place {right!r}) is not one of "
            f"the choices {choices!r}. Give its place as `answer_index`, counted from 0."
        )
    return int(place)


def fits(completion: str, pattern: str) -> bool | None:
    """Return whether the whole answer matches a regular expression; None: it took too long."""
    try:
        return regex.fullmatch(pattern, completion, timeout=PATTERN_SECONDS) is not None
    except TimeoutError:
        return None
    except regex.error as error:
        raise UserError(
            f"`reward` format: {pattern!r} is not a regular expression ({error}). Correct it."
        ) from error
