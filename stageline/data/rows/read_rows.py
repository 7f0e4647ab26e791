"""Rows of files, each with its place for error messages.

JSON, JSON lines, CSV and text are read line by line here: `datasets.load_dataset` makes a date of
"2020-01-01", in a table 7 of "007" and nothing of "NA", and its errors name no line. The datasets
library does the rest: tables mapped into memory, their cache, Parquet, Arrow and the hub.
"""

import csv
import difflib
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.data.rows.bad_rows import current_bad_rows
from stageline.errors import DataError, UserError
from stageline.hub import PREFIX, pinned_set, read_name

Kind = Literal["json", "jsonl", "csv", "text", "parquet", "arrow", "hub"]
Take = Callable[[str, Exception], None]  # is told the source of a bad row and its error
Found = Iterator[tuple[Any, str, int]]  # (content, source, line or number)
KIND_OF_SUFFIX: dict[str, Kind] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_VERSION = "2"  # version of the tables that are made of text
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json")  # next to files of rows
_PATTERN = "*?["
_BOM = b"\xef\xbb\xbf"
# values that JSON has no form for, and half surrogate pairs, on which tokenizers fail
_MAY_BE_BAD = re.compile(r"NaN|Infinity|\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row as it is written in a file."""

    data: Any  # the object, or the text of a prompt
    source: str  # file and line (JSON lines, CSV, text), or file and number of the row
    number: int  # line or row, from 1; in a set of several files the row's place from 0
    digest: str = ""  # SHA-256 of the file; empty where it is not known


@dataclass(frozen=True)
class SetFiles:
    """The files of a set, sorted."""

    kind: Kind
    paths: list[Path]
    folder: Path  # that names of images are relative to
    hub_name: str = ""  # empty: not a set of the hub


def find_files(place: str, *, option: str = "`dataset_path`") -> SetFiles:
    """Return the files that a path, a folder, a pattern or `owner/name[@revision]` names.

    Raises:
        UserError: there is none, or they are of several kinds or of one that is not read.
    """
    if read_name(place) is not None:
        name = pinned_set(place, option=option).removeprefix(PREFIX)
        return SetFiles("hub", [], Path.cwd(), name)
    path = Path(place).expanduser()
    if path.is_file():
        found, folder = [path], path.parent
    elif path.is_dir():
        found, folder = sorted(path.iterdir()), path
    elif any(sign in place for sign in _PATTERN):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        fixed = re.split(r"[*?[]", str(path))[0]
        folder = Path(fixed + "x").parent
    else:
        there = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(
            f"{option} {place}: there is no such file or folder.{near_names(path.name, there)} "
            f"Give a file, a folder, a pattern such as data/*.jsonl, or {PREFIX}owner/name; a path "
            f"is relative to {Path.cwd()}."
        )
    by_kind: dict[Kind, list[Path]] = {}
    for item in found:
        kind = KIND_OF_SUFFIX.get(item.suffix.lower())
        is_hidden = item.name.startswith((".", "_")) or item.name in _NO_ROWS
        if kind is not None and item.is_file() and (item == path or not is_hidden):
            by_kind.setdefault(kind, []).append(item)
    if len(by_kind) != 1:
        names = sorted(paths[0].name for paths in by_kind.values())
        what = f"has files of {len(names)} kinds: {', '.join(names)}"
        if not names:
            seen = ", ".join(item.name for item in found[:8]) or "nothing"
            what = f"names no file of rows; it has {seen}"
        raise UserError(
            f"{option} {place} {what}. Give files of one kind, which end in one of "
            f"{' '.join(KIND_OF_SUFFIX)}."
        )
    ((kind, paths),) = by_kind.items()
    return SetFiles(kind, paths, folder)


def near_names(name: str, known: Iterable[str]) -> str:
    """Return a question for an error: whether one of these names was meant; may be empty."""
    near = difflib.get_close_matches(name, list(known))
    return f" Did you mean {' or '.join(near)}?" if near else ""


def read_rows(path: Path, kind: Kind | None = None, *, may_be_lists: bool = False) -> list[Row]:
    """Return all rows of a file; `.json` is a list, any other JSON lines unless `kind` is given.

    A row may be a list with `may_be_lists`. A DataError names file and line of the first bad row,
    unless it may be left out (bad_rows.py).
    """
    kind = kind or ("json" if path.suffix.lower() == ".json" else "jsonl")
    rows = list(each_row(path, kind, take=current_bad_rows().take, may_be_lists=may_be_lists))
    if not rows:
        raise _no_rows(path)
    digest = _digest_of(path)
    return [Row(row.data, row.source, row.number, digest) for row in rows]


def _no_rows(path: Path) -> DataError:
    size, bad = path.stat().st_size, current_bad_rows().listed(5)
    why = f"has no {'good ' if bad else ''}rows in its {size} bytes" if size else "is empty"
    return DataError(f"{path} {why}. Check the file.\n{bad}".rstrip())


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def each_row(path: Path, kind: Kind, *, take: Take, may_be_lists: bool = False) -> Iterator[Row]:
    """Yield the rows of a file that people write; bad rows go to `take`."""
    if not path.is_file():
        raise UserError(f"there is no file {path}. Check `dataset_path` and the dataset's options.")
    read = {"json": _json_list, "jsonl": _json_lines, "csv": _csv_rows, "text": _text_rows}[kind]
    for data, source, number in read(path, take):
        if isinstance(data, dict) or (may_be_lists and isinstance(data, list)):
            yield Row(data, source, number)
        else:
            take(source, DataError(f"{source}: the row is {repr(data)[:60]}. Write an object."))


def _decode(content: bytes, start: int, path: Path, line: int) -> str:
    """Return the text of bytes that begin at byte `start` and in this line of a file."""
    try:
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        place = error.start + len(content) - len(error.object)
        line += content.count(b"\n", 0, place)
        raise DataError(
            f"{path}:{line}: not UTF-8: byte 0x{content[place]:02x} at byte {start + place} of the "
            f"file ({error.reason}). Save the file as UTF-8, or correct the line."
        ) from error


def _lines(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield (line, bytes before it, number from 1) of each line."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield line, start, number
            start += len(line)


def _text_lines(path: Path, take: Take) -> Iterator[tuple[str, str, int]]:
    """Yield the lines that are not blank, with their source and number."""
    for line, start, number in _lines(path):
        source = f"{path}:{number}"
        try:
            text = _decode(line, start, path, number)
        except DataError as error:
            take(source, error)
            continue
        if text.strip():
            yield text, source, number


def _text_rows(path: Path, take: Take) -> Found:
    for text, source, number in _text_lines(path, take):
        yield {"text": text.rstrip("\r\n")}, source, number


def _json_lines(path: Path, take: Take) -> Found:
    for text, source, number in _text_lines(path, take):
        try:
            data = json.loads(text)
            if _MAY_BE_BAD.search(text):
                check_value(data)
        except (ValueError, RecursionError) as error:
            place = getattr(error, "pos", None)
            column = "" if place is None else f":{place + 1}"
            cut = "" if text.endswith(("\n", "\r")) else " The file may be cut short here."
            what = f"{source}{column}: {_reason(error, text)}.{cut}"
            take(source, DataError(f"{what} Write one JSON object a line, or delete the line."))
        else:
            yield data, source, number


def _json_list(path: Path, take: Take) -> Found:
    text = _decode(path.read_bytes(), 0, path, 1)
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", 0)
        line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
        cut = "" if text.rstrip().endswith("]") else " The file may be cut short: it lacks a ']'."
        raise DataError(
            f"{path}:{line}:{column}: {_reason(error, text)}.{cut} Correct the list (a file of "
            "JSON lines ends in .jsonl)."
        ) from None
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a JSON {type(rows).__name__}. Put the rows into one list.")
    may_be_bad = _MAY_BE_BAD.search(text)
    for number, data in enumerate(rows, 1):
        source = f"{path}: row {number}"
        try:
            if may_be_bad:
                check_value(data)
        except ValueError as error:
            take(source, DataError(f"{source}: {error}. Correct the row."))
        else:
            yield data, source, number


def check_value(value: Any) -> None:
    """Refuse NaN, and texts with half a surrogate pair, on which tokenizers fail."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(error.start - 40, 0) : error.end]
        raise ValueError(
            f"half a surrogate pair, which is not text, at the end of {near!r}"
        ) from None
    except ValueError:
        raise ValueError("NaN and Infinity are not numbers of JSON") from None


def _reason(error: Exception, text: str) -> str:
    """Return what is wrong with a text of JSON, and some of it before that place."""
    if isinstance(error, RecursionError):
        return f"no JSON (lists or objects are nested too deeply) in {text[:60].strip()!r}"
    if not isinstance(error, json.JSONDecodeError):
        return f"{error} in {text[:60].strip()!r}"
    near = text[max(error.pos - 40, 0) : error.pos + 20].strip()
    return f"no JSON ({error.msg}) in {near!r}"


def _csv_rows(path: Path, take: Take) -> Found:
    line = 0

    def text_of(found: tuple[bytes, int, int]) -> str:
        nonlocal line
        content, start, line = found
        return _decode(content, start, path, line)

    csv.field_size_limit(1 << 30)  # sets the limit of this process; 128 KiB by default
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    table = csv.reader(map(text_of, _lines(path)), strict=True, delimiter=delimiter)
    names: list[str] = []
    while True:
        first = line + 1
        source = f"{path}:{first}"
        try:
            cells = next(table, None)
            if cells is None:
                return
            if not names:
                found = [name.strip() for name in cells]
                if "" in found or len(set(found)) < len(found):
                    raise csv.Error(f"the columns are {', '.join(map(repr, found))}")
                names = found
            elif cells and len(cells) != len(names):
                raise csv.Error(f"{len(cells)} cells in {len(names)} columns, {', '.join(names)}")
            elif cells:  # not a blank line
                yield dict(zip(names, cells, strict=True)), source, first
        except (csv.Error, DataError) as error:
            wrong: Exception = error
            if isinstance(error, csv.Error):
                wrong = DataError(
                    f"{source}: no CSV ({error}). Write a first line with a name for each column, "
                    'and double quotes around a text with a separator, a line break or "".'
                )
            if not names:
                raise wrong from None
            take(source, wrong)


@dataclass(frozen=True)
class Table:
    """The good rows of one file, mapped into memory."""

    name: str  # name of the file, as it was given
    rows: Any  # a datasets.Dataset
    digest: str  # SHA-256 of the file's bytes, or the fingerprint that datasets gives a hub set
    kind: Kind
    num_rows: int

    def __getitem__(self, index: int) -> Row:
        """Return a row; its number is its line, or its place in the file from 1."""
        if self.kind in ("parquet", "arrow", "hub"):
            data = without_none(self.rows[index], self.rows.features)
            return Row(data, f"{self.name}: row {index + 1}", index + 1)
        # `_text_table` wrote it as JSON; twenty times as fast as datasets' own way to a row
        columns = self.rows.data
        data, number = (columns.column(name)[index].as_py() for name in ("row", "number"))
        place = f": row {number}" if self.kind == "json" else f":{number}"
        return Row(json.loads(data), f"{self.name}{place}", number)


class TableRows(Sequence[Row]):
    """Rows of several tables, by their `numbers`, counted over all tables from 0."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self._starts = numpy.cumsum([0, *(table.num_rows for table in tables)])
        self.num_read = int(self._starts[-1])
        self.numbers = numpy.arange(self.num_read, dtype=numpy.int64)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        number = int(self.numbers[index])
        table, place = part_of(self._starts, number)
        return replace(self.tables[table][place], number=number)


def part_of(starts: numpy.ndarray, number: int) -> tuple[int, int]:
    """Return (part, row in it) of a row that is numbered over parts with these first rows."""
    part = int(numpy.searchsorted(starts, number, side="right")) - 1
    return part, number - int(starts[part])


def open_tables(
    files: SetFiles, *, cache: str | Path | None = None, hub_split: str = "train"
) -> TableRows:
    """Return the rows of a set; bad rows go to `current_bad_rows`; `cache` as of `read_sets`."""
    import datasets

    folder = str(cache or datasets.config.HF_DATASETS_CACHE)
    if files.kind != "hub":
        datasets.disable_progress_bars()  # the files are local
        return TableRows([_table(path, files.kind, folder) for path in files.paths])
    repo, _, revision = files.hub_name.partition("@")
    name = f"{PREFIX}{files.hub_name}"
    try:
        rows = datasets.load_dataset(
            repo, revision=revision or None, split=hub_split, cache_dir=folder
        )
    except Exception as error:
        raise UserError(
            f"{name} cannot be loaded ({type(error).__name__}: {error}). Check the name, download "
            "it first, or give a file, a folder or a pattern."
        ) from error
    return TableRows([Table(name, rows, str(rows._fingerprint), "hub", len(rows))])


def _table(path: Path, kind: Kind, folder: str) -> Table:
    """Return the table of a file. Of one that people write, datasets makes it once.

    Its rows are the good ones, then the reasons of the bad ones, then the file's digest.
    """
    import datasets

    if kind in ("parquet", "arrow"):
        rows = _load(path, kind, cache_dir=folder)
        if len(rows) == 0:
            raise _no_rows(path)
        return Table(str(path), rows, _digest_of(path), kind, len(rows))
    now = path.stat()
    facts = (_VERSION, kind, str(path), str(path.absolute()), now.st_size, now.st_mtime_ns)
    columns = {"row": "large_string", "number": "int64", "bad": "large_string"}
    features = datasets.Features({name: datasets.Value(type_) for name, type_ in columns.items()})
    try:
        rows = datasets.Dataset.from_generator(
            _written_rows,
            features=features,
            cache_dir=folder,
            gen_kwargs={"path": path, "kind": kind},
            fingerprint=hashlib.sha256(repr(facts).encode()).hexdigest()[:32],
        )
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(
            f"the rows of {path} cannot be kept in {folder} ({cause}). Name another folder with "
            "`dataset.cache`, or make room."
        ) from error
    num_good = rows.data.column("bad").null_count
    *bad, last = rows.data.slice(num_good).to_pylist()
    for found in bad:
        current_bad_rows().take(found["bad"], DataError(found["row"]))
    if num_good == 0:
        raise _no_rows(path)
    return Table(str(path), rows, last["row"], kind, num_good)


def _written_rows(path: Path, kind: Kind) -> Iterator[dict[str, Any]]:
    bad: list[tuple[str, Exception]] = []
    for row in each_row(path, kind, take=lambda source, error: bad.append((source, error))):
        yield {"row": json.dumps(row.data, ensure_ascii=False), "number": row.number, "bad": None}
    for source, error in bad:
        yield {"row": str(error), "number": 0, "bad": source}
    yield {"row": _digest_of(path), "number": 0, "bad": "digest"}


def stream_rows(path: Path, kind: Kind, *, take: Take) -> Iterator[Row]:
    """Yield the rows of a file, a few in memory at a time."""
    if kind in ("parquet", "arrow"):
        rows = _load(path, kind, streaming=True)
        for number, row in enumerate(rows, 1):
            yield Row(without_none(row, rows.features), f"{path}: row {number}", number)
    else:
        yield from each_row(path, kind, take=take)


def _load(path: Path, kind: Kind, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(kind, data_files=[str(path)], split="train", **options)
    except Exception as error:  # datasets' readers can raise any exception
        cause = error.__cause__ or error
        raise DataError(
            f"{path} cannot be read as {kind} ({type(cause).__name__}: {cause}). Check how it was "
            "written, or copy it again."
        ) from error


def without_none(value: Any, feature: Any = None) -> Any:
    """Return a value without the keys that are None, at any depth.

    In tables all rows have the same keys, so a tool's arguments would get those of all others. A
    column whose type in datasets, `feature`, is Json keeps its None, which is in the file.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        types = feature if isinstance(feature, dict) else {}
        kept = {key: item for key, item in value.items() if item is not None}
        return {key: without_none(item, types.get(key)) for key, item in kept.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [without_none(item, inner) for item in value]
    return value
