"""Rows of files that people write: JSON, JSON lines, CSV, text. One after the other, strictly.

Not read with `datasets.load_dataset`: of "2020-01-01" it makes a date, of "007" in a table 7, of
"NA" nothing, and its errors name no line. Here text stays text, and a bad row has its line. Bad
rows go to `current_bad_rows`.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stageline.data.bad_rows import current_bad_rows
from stageline.data.read_json import decode_line, each_row
from stageline.data.row_files import MAX_LINE_BYTES, RowFileReader
from stageline.data.sets.files import Kind
from stageline.errors import DataError

NumberedRow = tuple[dict[str, Any], str, int]  # row, its source, its line or number


def text_rows(reader: RowFileReader, kind: Kind) -> Iterator[NumberedRow]:
    """All rows of a file.

    Raises:
        DataError: for a row that may not be left out.
    """
    return _READERS[kind](reader)


def _csv_rows(reader: RowFileReader) -> Iterator[NumberedRow]:
    lines = _Lines(reader)
    csv.field_size_limit(MAX_LINE_BYTES)  # of this process; the library's 128 KiB cut long texts
    delimiter = "\t" if reader.path.suffix.lower() == ".tsv" else ","
    table = csv.reader(lines, strict=True, delimiter=delimiter)
    names = _header(reader.path, table)
    number = 0
    while True:
        first = lines.number + 1
        source = f"{reader.path}:{first}"
        try:
            cells = next(table)
            if not cells:
                continue  # a blank line
            number += 1
            yield _named(cells, names, source=source, number=number), source, first
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            current_bad_rows().take(source, _no_csv(source, number, str(error)))
        except DataError as error:
            current_bad_rows().take(source, error)


class _Lines:
    """The lines of a file as text, and how many were handed out."""

    def __init__(self, reader: RowFileReader) -> None:
        self._lines = reader.lines()
        self._path = reader.path
        self.number = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        self.number, start, line = next(self._lines)
        return decode_line(line, start, f"{self._path}:{self.number}")


def _header(path: Path, table: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip() for name in next(table, [])]
    except csv.Error as error:
        raise _no_csv(f"{path}:1", 0, str(error)) from None
    if not names:
        return []
    if "" in names or len(set(names)) < len(names):
        raise DataError(
            f"{path}:1: the columns are {', '.join(map(repr, names))}. A name for each column, and "
            "each name once, was expected in the first line, because a sample's fields are called "
            "by it: write a first line of names."
        )
    return names


def _named(cells: list[str], names: list[str], *, source: str, number: int) -> dict[str, str]:
    if len(cells) == len(names):
        return dict(zip(names, cells, strict=True))
    raise DataError(
        f"{source}: row {number} has {len(cells)} cells, and there are {len(names)} columns: "
        f"{', '.join(names)}. As many were expected: put a text that holds the separator or a "
        "line break between double quotes."
    )


def _no_csv(source: str, number: int, what: str) -> DataError:
    return DataError(
        f"{source}: row {number} is no CSV ({what}). Cells between separators were expected, with "
        'double quotes around a text and "" for a quote in it: correct the row.'
    )


def _lines_of_text(reader: RowFileReader) -> Iterator[NumberedRow]:
    for number, start, line in reader.lines():
        source = f"{reader.path}:{number}"
        try:
            text = decode_line(line, start, source).rstrip("\r\n")
        except DataError as error:
            current_bad_rows().take(source, error)
            continue
        if text.strip():
            yield {"text": text}, source, number


_READERS: dict[str, Callable[[RowFileReader], Iterator[NumberedRow]]] = {
    "json": each_row,
    "jsonl": each_row,
    "csv": _csv_rows,
    "text": _lines_of_text,
}
