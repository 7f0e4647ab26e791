"""Rows of JSON-lines files and JSON lists, each with its place for error messages."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.row_files import MAX_LINE_BYTES, RowFile, RowFileReader
from stageline.errors import DataError

# -- reads JSON strictly: what JSON does not have, or what two readers would read differently -----
# Python's reader takes NaN, keeps the last of two equal keys, and lets lone surrogates through to
# the tokenizer, which fails far from the line. Knows neither files nor rows.

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
        # typeshed leaves scan_once out, which json.JSONDecoder documents by using it
        value, end = _strict.scan_once(text, start)  # type: ignore[attr-defined]
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
        return _lenient.scan_once(text, start)[1]  # type: ignore[attr-defined]  # as above
    except (StopIteration, ValueError, RecursionError):
        return None


def skip_blanks(text: str, start: int) -> int:
    """The first place from `start` on that is no blank."""
    blanks = _BLANK.match(text, start)
    assert blanks is not None  # it matches nothing, too
    return blanks.end()


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


# -------------------------------------------------------------------------------------------------

_BOM = b"\xef\xbb\xbf"
_CUT = " The file ends here without a line break: it may be cut short."


@dataclass(frozen=True)
class Row:
    """One row as it stands in a file.

    Attributes:
        data: the object, or the list of a format that has lists.
        source: file and line (JSON lines), or file and number of the row (JSON).
        number: line or row, from 1.
        file: the file as it was when the row was read.
    """

    data: Any
    source: str
    number: int
    file: RowFile | None = None

    def text(self, field: str) -> str:
        """The text of a field.

        Raises:
            DataError: it is missing or no text.
        """
        value = self.data.get(field)
        if isinstance(value, str):
            return value
        what = "is missing" if value is None else f"is {repr(value)[:60]}"
        raise DataError(
            f"{self.source}: the field {field!r} {what}. Text was expected, because the prompt is "
            f"made from it; the row has the fields {', '.join(sorted(self.data)) or 'none'}. "
            "Correct the row."
        )


def read_rows(path: Path, *, may_be_lists: bool = False) -> list[Row]:
    """All rows of a `.json` file (a list) or a file of JSON lines.

    Args:
        may_be_lists: a row may be a list instead of an object.

    Raises:
        DataError: names file and line of the first row that is no JSON object or list, unless
            such rows may be left out (bad_rows.py); or the file is of another kind, or is empty.
        UserError: there is no such file.
    """
    reader = RowFileReader(path)
    found = list(each_row(reader, may_be_lists=may_be_lists))
    file = reader.done()
    if not found:
        why = "is empty" if file.size == 0 else f"has no rows in its {file.size} bytes"
        raise DataError(f"{path} {why}. At least one was expected: check `dataset_path`.")
    return [Row(data, source, number, file) for data, source, number in found]


def each_row(
    reader: RowFileReader, *, may_be_lists: bool = False
) -> Iterator[tuple[Any, str, int]]:
    """(object, source, number) of each row; bad ones go to `current_bad_rows`."""
    read = _read_json if reader.path.suffix.lower() == ".json" else _read_json_lines
    for data, source, number in read(reader):
        if isinstance(data, dict) or (may_be_lists and isinstance(data, list)):
            yield data, source, number
            continue
        error = DataError(
            f"{source}: the row is {repr(data)[:60]}. A JSON object was expected, because its "
            "fields are the sample: correct the row."
        )
        current_bad_rows().take(source, error)


def _read_json_lines(reader: RowFileReader) -> Iterator[tuple[Any, str, int]]:
    for number, start, line in reader.lines():
        source = f"{reader.path}:{number}"
        try:
            text = decode_line(line, start, source)
            if text.strip():
                yield _parse_line(text, line, source), source, number
        except DataError as error:
            current_bad_rows().take(source, error)


def decode_line(line: bytes, start: int, source: str) -> str:
    """The text of a line.

    Raises:
        DataError: it is no UTF-8, or longer than any sample.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{source}: the line has more than {MAX_LINE_BYTES >> 20} MiB. One sample a line was "
            "expected, and none is that long: the line breaks may be missing (a JSON list belongs "
            "into a .json file). Write one object a line."
        )
    try:
        return line.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        place = error.start + len(line) - len(line.removeprefix(_BOM))
        raise DataError(
            f"{source}: not UTF-8: byte 0x{error.object[error.start]:02x} at byte {start + place} "
            f"of the file ({error.reason}). UTF-8 was expected, because JSON is written in it: "
            "save the file as UTF-8, or correct the line."
        ) from error


def _parse_line(text: str, line: bytes, source: str) -> Any:
    try:
        return parse_json(text)
    except BadJson as error:
        column = "" if error.place is None else f":{error.place + 1}"
        cut = "" if line.endswith((b"\n", b"\r")) else _CUT
        raise DataError(
            f"{source}{column}: {error} in {_near(text, error.place)!r}.{cut} One JSON object a "
            "line was expected, because each line is a sample: correct or delete the line."
        ) from None


def _read_json(reader: RowFileReader) -> Iterator[tuple[Any, str, int]]:
    path = reader.path
    content = reader.whole()
    try:
        text = content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8: byte 0x{error.object[error.start]:02x} at byte "
            f"{error.start} of the file ({error.reason}). UTF-8 was expected, because JSON is "
            "written in it: save the file as UTF-8."
        ) from error
    place = skip_blanks(text, 0)
    if place == len(text):
        return
    if text[place] != "[":
        raise _no_list(path, text)
    yield from _elements(path, text, place + 1)


def _elements(path: Path, text: str, place: int) -> Iterator[tuple[Any, str, int]]:
    """The elements of a list, one after the other, so that a bad one can be named."""
    number = 0
    place = skip_blanks(text, place)
    is_over = text.startswith("]", place)
    while not is_over:
        number += 1
        source = f"{path}: row {number}"
        try:
            value, place = parse_one(text, place)
            yield value, source, number
        except BadJson as error:
            end = end_of_one(text, place)
            bad = _broken(path, text, place if error.place is None else error.place, error, number)
            if end is None:  # nobody knows where the next row begins
                raise bad from None
            current_bad_rows().take(source, bad)
            place = end
        place = skip_blanks(text, place)
        is_over = text.startswith("]", place)
        if not is_over and not text.startswith(",", place):
            raise _broken(path, text, place, "no JSON (a ',' or ']' is missing)", number)
        place = skip_blanks(text, place + 1)
    if place < len(text):
        raise _broken(path, text, place, "no JSON (something follows the list)", number)


def _no_list(path: Path, text: str) -> DataError:
    try:
        kind = type(parse_json(text)).__name__
    except BadJson as error:
        return _broken(path, text, error.place or 0, error, 1)
    return DataError(
        f"{path} holds a JSON {kind}. A list of rows was expected, because each element is a "
        "sample: put the rows into one list."
    )


def _broken(path: Path, text: str, place: int, what: object, number: int) -> DataError:
    line = text.count("\n", 0, place) + 1
    column = place - text.rfind("\n", 0, place)
    cut = (
        "" if text.rstrip().endswith("]") else " The file ends without a ']': it may be cut short."
    )
    return DataError(
        f"{path}:{line}:{column}: {what} in row {number}, {_near(text, place)!r}.{cut} A JSON list "
        "of rows was expected: correct the row (a file of JSON lines ends in .jsonl)."
    )


def _near(text: str, place: int | None) -> str:
    """Some of the text before a place; its beginning where none is known."""
    end = 60 if place is None else place + 20
    return text[max(end - 60, 0) : end].strip()
