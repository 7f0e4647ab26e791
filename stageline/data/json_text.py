"""Reads JSON strictly: what JSON does not have, or what two readers would read differently.

Python's reader takes NaN, keeps the last of two equal keys, and lets lone surrogates through to the
tokenizer, which fails far from the line. Knows neither files nor rows.
"""

import json
import math
import re
from typing import Any

MAX_DIGITS = 4300  # of an integer; Python's own limit, whose error does not say what came
MAX_NESTING = 100  # of lists and objects; so that whatever walks through a row can
_MAY_HOLD_BAD_CHARACTERS = re.compile(r"\\u(0000|[dD][89a-fA-F])")
_BLANK = re.compile(r"[ \t\r\n]*")


class BadJson(ValueError):
    """Text that is no JSON, or none that is taken.

    Attributes:
        place: character of the text where reading stopped; None where it is not known.
    """

    def __init__(self, what: str, place: int | None = None) -> None:
        super().__init__(what)
        self.place = place


def parse_json(text: str) -> Any:
    """The value that a text holds.

    Raises:
        BadJson: says what is wrong, and where.
    """
    value, end = parse_one(text, skip_blanks(text, 0))
    end = skip_blanks(text, end)
    if end < len(text):
        raise BadJson("no JSON (something follows the value)", end)
    return value


def parse_one(text: str, start: int) -> tuple[Any, int]:
    """One value that begins at `start`, and the place behind it.

    Raises:
        BadJson: says what is wrong, and where.
    """
    try:
        value, end = _strict.scan_once(text, start)
    except StopIteration as stop:
        raise BadJson("no JSON (a value is missing)", stop.value) from None
    except json.JSONDecodeError as error:
        raise BadJson(f"no JSON ({error.msg})", error.pos) from None
    except RecursionError:
        raise _too_deep() from None
    may_be_deep = text.count("[", start, end) + text.count("{", start, end) > MAX_NESTING
    if may_be_deep or _MAY_HOLD_BAD_CHARACTERS.search(text, start, end):
        check_value(value)
    return value, end


def end_of_one(text: str, start: int) -> int | None:
    """The place behind a value that is refused but is JSON; None where there is no such place."""
    try:
        return _lenient.scan_once(text, start)[1]
    except (StopIteration, ValueError, RecursionError):
        return None


def skip_blanks(text: str, start: int) -> int:
    """The first place from `start` on that is no blank."""
    return _BLANK.match(text, start).end()


def check_value(value: Any) -> None:
    """Refuses texts with a NUL, or with half of a character that UTF-16 writes in two halves.

    And lists and objects in one another without end.

    Raises:
        BadJson: names the field.
    """
    waiting: list[tuple[str, Any, int]] = [("", value, 0)]
    while waiting:
        field, value, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise _too_deep()
        if isinstance(value, dict):
            waiting += [(str(key), item, depth + 1) for key, item in value.items()]
            waiting += [(key, key, depth) for key in value]
        elif isinstance(value, list):
            waiting += [(field, item, depth + 1) for item in value]
        elif isinstance(value, str):
            _check_characters(field, value)


def _check_characters(field: str, text: str) -> None:
    found = re.search("[\0\ud800-\udfff]", text)
    if found:
        kind = "a NUL" if found[0] == "\0" else "half a surrogate pair"
        raise BadJson(
            f"{kind} (\\u{ord(found[0]):04x}) as character {found.start()} of the field "
            f"{field[:60]!r}: no text that a tokenizer takes"
        )


def _too_deep() -> BadJson:
    return BadJson(f"lists or objects are nested deeper than {MAX_NESTING}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadJson(f"the key {key!r} comes twice in one object")
        seen.add(key)
    raise AssertionError("a key comes twice")


def _constant(name: str) -> Any:
    raise BadJson(f"{name} is no number of JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BadJson(f"the number {digits[:40]} is too large")
    return value


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise BadJson(f"an integer of {len(digits)} digits, at most {MAX_DIGITS} are read")
    return int(digits)


_strict = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
)
_lenient = json.JSONDecoder(parse_float=str, parse_int=str)
