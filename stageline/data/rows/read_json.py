"""Files of rows: JSON lines and JSON lists, read strictly, each row with its place for messages.

Python's reader takes NaN, which is not JSON, and lets lone surrogates through to the tokenizer,
which fails far from the line. Both are refused here.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stageline.data.rows.bad_rows import current_bad_rows
from stageline.errors import DataError, UserError

MAX_LINE_BYTES = 32 << 20  # a book has 1 MiB
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_MAY_HOLD_BAD_CHARACTERS = re.compile(r"\\u(0000|[dD][89a-fA-F])")
_BLANK = re.compile(r"[ \t\r\n]*")
# ending, kind, cure and first bytes of files that are no text
_OTHER_KINDS = (
    (".gz", "gzip", "decompress it first (gunzip)", b"\x1f\x8b"),
    (".zip", "zip", "unpack it first (unzip)", b"PK\x03\x04"),
    (".zst", "zstandard", "decompress it first (unzstd)", b"\x28\xb5\x2f\xfd"),
    (".xz", "xz", "decompress it first (unxz)", b"\xfd7zXZ\x00"),
    (".bz2", "bzip2", "decompress it first (bunzip2)", b"BZh"),
    (".parquet", "parquet", "write its rows as JSON lines (pandas: to_json(lines=True))", b"PAR1"),
    (".arrow", "arrow", "write its rows as JSON lines (datasets: to_json)", b"ARROW1"),
)


@dataclass(frozen=True)
class RowFile:
    """A file as it was when its rows were read; `digest` is the SHA-256 of its bytes."""

    path: Path
    size: int
    digest: str


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    """Refuses archives and tables by their first bytes, and by their names."""
    by_bytes = [kind for kind in _OTHER_KINDS if head.startswith(kind[3])]
    by_name = [kind for kind in _OTHER_KINDS if path.suffix.lower() == kind[0]]
    if by_bytes or by_name:
        _, kind, cure, _ = (by_bytes or by_name)[0]
        how = "its first bytes say so" if by_bytes else "its name says so, not its first bytes"
        raise DataError(
            f"{path} is a {kind} file ({how}). JSON lines or a JSON list were expected, as plain "
            f"text, because other kinds of files are not read: {cure}."
        )


class RowFileReader:
    """Reads a file once, from its beginning to its end, and then knows what it was.

    Raises:
        UserError: there is no such file.
        DataError: it cannot be read, or is of a kind that is not read.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"there is no file {path}. The dataset's rows were expected there: check "
                "`dataset_path` and the options of the dataset."
            )
        self.path = path
        self._digest = hashlib.sha256()
        self._size = 0
        self._before: os.stat_result | None = None

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, bytes before it, line) of each line.

        Of a line longer than `MAX_LINE_BYTES` no more than one byte above that is handed out.
        """
        with self._open() as file:
            number = 0
            while True:
                start = self._size
                line = self._read(file.readline, MAX_LINE_BYTES + 1)
                if not line:
                    return
                number += 1
                rest = line
                while len(line) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
                    rest = self._read(file.readline, _CHUNK)
                yield number, start, line

    def whole(self) -> bytes:
        with self._open() as file:
            return self._read(file.read, -1)

    def done(self) -> RowFile:
        assert self._before is not None, "nothing was read"
        before = self._before
        if (before.st_size, before.st_mtime_ns) != (self._size, os.stat(self.path).st_mtime_ns):
            raise DataError(
                f"{self.path} changed while it was read: {before.st_size} bytes were expected, "
                f"{self._size} came. A file that nobody writes was expected, because each process "
                "has to read the same rows: wait until it is complete, and start again."
            )
        return RowFile(self.path, before.st_size, self._digest.hexdigest())

    def _open(self) -> BinaryIO:
        try:
            file = self.path.open("rb")
            self._before = os.fstat(file.fileno())
            head = file.read(16)
            file.seek(0)
        except OSError as error:
            raise self._unreadable(error) from error
        _refuse_other_kinds(self.path, head)
        return file

    def _read(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            data = read(size)
        except OSError as error:
            raise self._unreadable(error) from error
        self._size += len(data)
        self._digest.update(data)
        return data

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.path} cannot be read after {self._size} bytes ({error.strerror or error}). Its "
            "rows are the data of the run: check its rights and its disk."
        )


class _BadJson(ValueError):
    """Text that is no JSON, or none that is taken.

    Attributes:
        place: character of the text where reading stopped; None where it is not known.
    """

    def __init__(self, what: str, place: int | None = None) -> None:
        super().__init__(what)
        self.place = place


def _parse_json(text: str) -> Any:
    """The value that a text holds."""
    value, end = _decode_json(_STRICT, text, _skip_blanks(text, 0))
    end = _skip_blanks(text, end)
    if end < len(text):
        raise _BadJson("no JSON (something follows the value)", end)
    if _MAY_HOLD_BAD_CHARACTERS.search(text):
        check_value(value)
    return value


def _decode_json(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    """One value that begins at `start`, and the place behind it."""
    try:
        return decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _BadJson(f"no JSON ({error.msg})", error.pos) from None
    except RecursionError:
        raise _BadJson("no JSON (lists or objects are nested too deeply)") from None
    except ValueError as error:  # _constant's, or Python's of an integer of 5,000 digits
        raise _BadJson(str(error)) from None


def _skip_blanks(text: str, start: int) -> int:
    """The first place from `start` on that is no blank."""
    blanks = _BLANK.match(text, start)
    assert blanks is not None  # it matches nothing, too
    return blanks.end()


def check_value(value: Any) -> None:
    """Refuses texts with a NUL or half a surrogate pair.

    Raises:
        ValueError: says where.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(key), item) for key, item in value.items()]
            waiting += [(key, key) for key in value]
        elif isinstance(value, list):
            waiting += [(field, item) for item in value]
        elif isinstance(value, str) and (bad := re.search("[\0\ud800-\udfff]", value)):
            kind = "a NUL" if bad[0] == "\0" else "half a surrogate pair"
            raise _BadJson(
                f"{kind} (\\u{ord(bad[0]):04x}) as character {bad.start()} of the field "
                f"{field[:60]!r}: no text that a tokenizer takes"
            )


def _constant(name: str) -> Any:
    raise _BadJson(f"{name} is no number of JSON")


_STRICT = json.JSONDecoder(parse_constant=_constant)
_LENIENT = json.JSONDecoder()  # finds the end of a value that is refused


@dataclass(frozen=True)
class Row:
    """One row as it stands in a file.

    Attributes:
        data: the object, or the list of a format that has lists.
        source: file and line (JSON lines), or file and number of the row (JSON).
        number: line or row, from 1.
    """

    data: Any
    source: str
    number: int
    file: RowFile | None = None


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
    for text, source, number in text_lines(reader):
        try:
            yield _parse_line(text, source), source, number
        except DataError as error:
            current_bad_rows().take(source, error)


def text_lines(reader: RowFileReader) -> Iterator[tuple[str, str, int]]:
    """(text, source, number) of each line that is not blank; bad ones go to `current_bad_rows`."""
    for number, start, line in reader.lines():
        source = f"{reader.path}:{number}"
        try:
            text = decode_line(line, start, source)
        except DataError as error:
            current_bad_rows().take(source, error)
            continue
        if text.strip():
            yield text, source, number


def decode_line(line: bytes, start: int, source: str) -> str:
    """The text of a line.

    Args:
        start: bytes of the file before it.

    Raises:
        DataError: it is no UTF-8, or longer than any sample.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{source}: the line has more than {MAX_LINE_BYTES >> 20} MiB. One sample a line was "
            "expected, and none is that long: the line breaks may be missing (a JSON list belongs "
            "into a .json file). Write one object a line."
        )
    return _decode(line, start, source)


def _decode(content: bytes, start: int, source: str, *, is_file: bool = False) -> str:
    """A text, without the mark that some editors put before it; of a file, errors add the line."""
    try:
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        place = error.start + len(content) - len(error.object)
        if is_file:
            line = 1 + content.count(b"\n", 0, place)
            source = f"{source}:{line}"
        raise DataError(
            f"{source}: not UTF-8: byte 0x{content[place]:02x} at byte {start + place} of the file "
            f"({error.reason}). UTF-8 was expected, because rows are read as it: save the file as "
            "UTF-8, or correct the line."
        ) from error


def _parse_line(text: str, source: str) -> Any:
    try:
        return _parse_json(text)
    except _BadJson as error:
        column = "" if error.place is None else f":{error.place + 1}"
        is_whole = text.endswith(("\n", "\r"))
        cut = "" if is_whole else " The file ends here without a line break: it may be cut short."
        raise DataError(
            f"{source}{column}: {error} in {_near(text, error.place)!r}.{cut} One JSON object a "
            "line was expected, because each line is a sample: correct or delete the line."
        ) from None


def _read_json(reader: RowFileReader) -> Iterator[tuple[Any, str, int]]:
    """The elements of a list, one after the other, so that a bad one can be named."""
    path = reader.path
    text = _decode(reader.whole(), 0, str(path), is_file=True)
    place = _skip_blanks(text, 0)
    if place == len(text):
        return
    if text[place] != "[":
        raise _no_list(path, text)
    number = 0
    place = _skip_blanks(text, place + 1)
    is_over = text.startswith("]", place)
    while not is_over:
        number += 1
        source = f"{path}: row {number}"
        try:
            end = _decode_json(_LENIENT, text, place)[1]
        except _BadJson as error:  # nobody knows where the next row begins
            raise _broken(path, text, error.place or place, error, number) from None
        try:
            yield _parse_json(text[place:end]), source, number
        except _BadJson as error:
            current_bad_rows().take(source, _broken(path, text, place, error, number))
        place = _skip_blanks(text, end)
        is_over = text.startswith("]", place)
        if not is_over and not text.startswith(",", place):
            raise _broken(path, text, place, "no JSON (a ',' or ']' is missing)", number)
        place = _skip_blanks(text, place + 1)
    if place < len(text):
        raise _broken(path, text, place, "no JSON (something follows the list)", number)


def _no_list(path: Path, text: str) -> DataError:
    try:
        kind = type(_parse_json(text)).__name__
    except _BadJson as error:
        return _broken(path, text, error.place or 0, error, 1)
    return DataError(
        f"{path} holds a JSON {kind}. A list of rows was expected, because each element is a "
        "sample: put the rows into one list."
    )


def _broken(path: Path, text: str, place: int, what: object, number: int) -> DataError:
    line = text.count("\n", 0, place) + 1
    column = place - text.rfind("\n", 0, place)
    is_whole = text.rstrip().endswith("]")
    cut = "" if is_whole else " The file ends without a ']': it may be cut short."
    return DataError(
        f"{path}:{line}:{column}: {what} in row {number}, {_near(text, place)!r}.{cut} A JSON list "
        "of rows was expected: correct the row (a file of JSON lines ends in .jsonl)."
    )


def _near(text: str, place: int | None) -> str:
    """Some of the text before a place; its beginning where none is known."""
    end = 60 if place is None else place + 20
    return text[max(end - 60, 0) : end].strip()
