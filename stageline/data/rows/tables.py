"""A file of rows as a table of the `datasets` library, mapped into memory and not read into it.

A file that people write (JSON, CSV, text) is read once, strictly, into an Arrow file of a cache
folder; every process that opens it later finds it there. Such a file is not read with
`datasets.load_dataset`: of "2020-01-01" that makes a date, of "007" in a table 7, of "NA" nothing,
and its errors name no line. Parquet and Arrow files are the library's to load.
"""

import csv
import difflib
import functools
import glob
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from stageline.data.rows.bad_rows import BadRows, current_bad_rows, leaving_out
from stageline.data.rows.read_json import (
    MAX_LINE_BYTES,
    RowFileReader,
    decode_line,
    each_row,
    text_lines,
)
from stageline.errors import DataError, UserError
from stageline.hub import PREFIX, pinned_set, read_name

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["json", "jsonl", "csv", "text", "parquet", "arrow", "hub"]
NumberedRow = tuple[dict[str, Any], str, int]  # row, its source, its line or number
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
VERSION = 1  # of what is kept of a file
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json")  # beside files of rows
_PATTERN = "*?["
_MOST_BAD = 100_000  # rows of one file; more, and it is none


@dataclass(frozen=True)
class SetFiles:
    """The files of a set, sorted; of the kind hub, `names` holds the name of a set of the hub."""

    kind: Kind
    names: tuple[str, ...]
    folder: Path  # that names of images are relative to

    @property
    def paths(self) -> list[Path]:
        return [] if self.kind == "hub" else [Path(name) for name in self.names]


def find_files(place: str, *, option: str = "`dataset_path`") -> SetFiles:
    """The files that a path, a folder, a pattern or `owner/name[@revision]` of a hub names.

    Raises:
        UserError: there is none, or they are of several kinds or of one that is not read.
    """
    if read_name(place) is not None:
        return SetFiles("hub", (pinned_set(place, option=option).removeprefix(PREFIX),), Path.cwd())
    path = Path(place).expanduser()
    if path.is_file():
        if _kind_of(path) is None:
            raise UserError(
                f"{option} {path} ends in {path.suffix or 'nothing'}. One of "
                f"{' '.join(KIND_OF_SUFFIX)} was expected, because the ending says how a file is "
                "read: rename or convert it."
            )
        return SetFiles(KIND_OF_SUFFIX[path.suffix.lower()], (str(path),), path.parent)
    if path.is_dir():
        return _of_one_kind(place, sorted(path.iterdir()), folder=path, option=option)
    if any(sign in place for sign in _PATTERN):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        fixed = next(index for index, sign in enumerate(str(path)) if sign in _PATTERN)
        folder = Path(str(path)[:fixed] + "x").parent
        return _of_one_kind(place, found, folder=folder, option=option)
    there = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(
        f"{option} {place}: there is no such file or folder.{near_names(path.name, there)} A file, "
        f"a folder, a pattern such as data/*.jsonl, or {PREFIX}owner/name was expected, because "
        f"the rows are there. Correct the path; it is relative to {Path.cwd()}."
    )


def _of_one_kind(place: str, found: Sequence[Path], *, folder: Path, option: str) -> SetFiles:
    by_kind: dict[Kind, list[Path]] = {}
    for path in found:
        kind = _kind_of(path)
        is_hidden = path.name.startswith((".", "_")) or path.name in _NO_ROWS
        if kind is not None and path.is_file() and not is_hidden:
            by_kind.setdefault(kind, []).append(path)
    if len(by_kind) > 1:
        raise UserError(
            f"{option} {place} has files of {len(by_kind)} kinds: "
            f"{', '.join(sorted(paths[0].name for paths in by_kind.values()))}. One kind was "
            "expected, because files of a set are read one like the other: give a pattern such as "
            f"{folder / ('*' + sorted(by_kind)[0])}, or name each file as a set of its own."
        )
    if not by_kind:
        there = ", ".join(path.name for path in found[:8]) or "nothing"
        raise UserError(
            f"{option} {place} names no file of rows; it has {there}. At least one file was "
            f"expected that ends in {' '.join(KIND_OF_SUFFIX)}. Correct the path."
        )
    ((kind, paths),) = by_kind.items()
    return SetFiles(kind, tuple(map(str, paths)), folder)


def _kind_of(path: Path) -> Kind | None:
    return KIND_OF_SUFFIX.get(path.suffix.lower())


def near_names(name: str, known: Iterable[str]) -> str:
    """A question for an error: whether one of these names was meant; empty where none is near."""
    near = difflib.get_close_matches(name, list(known))
    return f" Did you mean {' or '.join(near)}?" if near else ""


def text_rows(reader: RowFileReader, kind: Kind) -> Iterator[NumberedRow]:
    """All rows of a file that people write; bad rows go to `current_bad_rows`."""
    read = {"json": each_row, "jsonl": each_row, "csv": _csv_rows, "text": _lines_of_text}
    return read[kind](reader)


def _csv_rows(reader: RowFileReader) -> Iterator[NumberedRow]:
    line = row = 0  # numbers

    def text_of(numbered: tuple[int, int, bytes]) -> str:
        nonlocal line
        line, start, content = numbered
        return decode_line(content, start, f"{reader.path}:{line}")

    csv.field_size_limit(MAX_LINE_BYTES)  # of this process; the library's 128 KiB cut long texts
    delimiter = "\t" if reader.path.suffix.lower() == ".tsv" else ","
    table = csv.reader(map(text_of, reader.lines()), strict=True, delimiter=delimiter)
    names = _header(reader.path, table)
    while True:
        first = line + 1
        source = f"{reader.path}:{first}"
        try:
            cells = next(table)
            if not cells:
                continue  # a blank line
            row += 1
            yield _named(cells, names, source=source, number=row), source, first
        except StopIteration:
            return
        except csv.Error as error:
            row += 1
            current_bad_rows().take(source, _no_csv(source, row, str(error)))
        except DataError as error:
            current_bad_rows().take(source, error)


def _header(path: Path, table: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip() for name in next(table, [])]
    except csv.Error as error:
        raise _no_csv(f"{path}:1", 0, str(error)) from None
    if "" in names or len(set(names)) < len(names):
        raise DataError(
            f"{path}:1: the columns are {', '.join(map(repr, names))}. A name for each column, "
            "each once, was expected in the first line, because a sample's fields are called by "
            "it: write a first line of names."
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
    for text, source, number in text_lines(reader):
        yield {"text": text.rstrip("\r\n")}, source, number


@dataclass(frozen=True)
class Table:
    """The rows of one file."""

    name: str  # of the file, as it was given
    rows: "Dataset"
    digest: str  # SHA-256 of the file's bytes, or what the library calls a set of the hub
    is_text: bool = False  # `rows` holds rows as JSON, with their lines; else the rows themselves
    has_lines: bool = False  # a row's number is its line

    @functools.cached_property
    def _columns(self) -> dict[str, Any]:
        # the library takes twenty times as long to hand out a row
        return {name: self.rows.data.column(name) for name in self.rows.column_names}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], str]:
        if not self.is_text:
            return without_none(self.rows[index], self.rows.features), self.source(index)
        return json.loads(self._columns["row"][index].as_py()), self.source(index)

    def source(self, index: int) -> str:
        """File and line, or file and number from 1."""
        number = self._columns["number"][index].as_py() if self.is_text else index + 1
        return f"{self.name}:{number}" if self.has_lines else f"{self.name}: row {number}"


def open_tables(
    files: SetFiles, *, cache: str | Path | None = None, hub_split: str = "train"
) -> list[Table]:
    """A table for each file of a set; bad rows go to `current_bad_rows`.

    Args:
        cache: folder of what is made of files; default: that of the library.
    """
    import datasets

    folder = Path(cache or datasets.config.HF_DATASETS_CACHE)
    if files.kind == "hub":
        return [_hub_table(files.names[0], folder, split=hub_split)]
    is_text = files.kind in ("json", "jsonl", "csv", "text")
    make = _text_table if is_text else _library_table
    return [make(path, files.kind, folder) for path in files.paths]


def without_none(value: Any, feature: Any = None) -> Any:
    """A value without the keys that are None, at any depth.

    In tables all rows have the same keys, so a tool's arguments would get those of all others. A
    column of type Json holds each value as it was written: None in it is meant.

    Args:
        feature: the type of the column in `datasets`; None: it is not known.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        types = feature if isinstance(feature, dict) else {}
        return {
            key: without_none(item, types.get(key))
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [without_none(item, inner) for item in value]
    return value


def stream_library(path: Path, kind: Kind) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, source) of a Parquet or Arrow file, a few rows in memory at a time."""
    rows = _load(kind, path, streaming=True)
    for number, row in enumerate(rows, 1):
        yield without_none(row, rows.features), f"{path}: row {number}"


def _text_table(path: Path, kind: Kind, folder: Path) -> Table:
    now = path.stat()
    # by its name as given, too: messages about bad rows have it
    facts = (VERSION, kind, str(path), str(path.absolute()), now.st_size, now.st_mtime_ns)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    place = folder / "stageline-rows" / f"{key}.arrow"
    found = _known(place)
    if found is None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{place}.lock"):  # other ranks wait for what the first one makes
                found = _known(place) or _make(path, kind, place)
        except OSError as error:
            raise UserError(
                f"what is made of the data files cannot be kept in {place.parent} "
                f"({error.strerror or error}). A folder that can be written to was expected, "
                "because rows are mapped into memory from there: name another one with "
                "`dataset.cache`, or make room."
            ) from error
    rows, kept = found
    for source, why in kept["bad"]:
        current_bad_rows().take(source, DataError(why))
    return Table(str(path), rows, kept["digest"], is_text=True, has_lines=kind != "json")


def _known(place: Path) -> "tuple[Dataset, dict[str, Any]] | None":
    """What was made of a file, if it is whole."""
    import datasets

    try:
        kept = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
        if place.stat().st_size != kept["bytes"]:
            return None
        return datasets.Dataset.from_file(str(place)), kept
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        return None


def _make(path: Path, kind: Kind, place: Path) -> "tuple[Dataset, dict[str, Any]]":
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = {"row": datasets.Value("large_string"), "number": datasets.Value("int64")}
    unfinished = place.with_name(f"{uuid.uuid4().hex}.unfinished")
    reader, bad = RowFileReader(path), BadRows(_MOST_BAD)
    try:
        num_rows = 0
        with leaving_out(bad):
            writer = ArrowWriter(path=str(unfinished), features=datasets.Features(features))
            for data, _, number in text_rows(reader, kind):
                writer.write({"row": json.dumps(data, ensure_ascii=False), "number": number})
                num_rows += 1
        file = reader.done()
        if num_rows == 0:
            raise DataError(
                f"{path} has no {'good ' if bad.reasons else ''}rows in its {file.size} bytes. At "
                f"least one was expected: check the file.\n{bad.listed(5)}".rstrip()
            )
        writer.finalize()
        kept = {
            "digest": file.digest,
            "bytes": unfinished.stat().st_size,
            "bad": list(bad.reasons.items()),
        }
        os.replace(unfinished, place)
        note = unfinished.with_suffix(".note")
        note.write_text(json.dumps(kept), encoding="utf-8")
        os.replace(note, place.with_suffix(".json"))  # last: without it nothing is believed
    finally:
        unfinished.unlink(missing_ok=True)
    found = _known(place)
    assert found is not None, f"{place} was just written"
    return found


def _library_table(path: Path, kind: Kind, folder: Path) -> Table:
    rows = _load(kind, path, cache_dir=str(folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if len(rows) == 0:
        raise DataError(f"{path} has no rows. At least one was expected: check the file.")
    return Table(str(path), rows, digest)


def _load(kind: Kind, path: Path, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(kind, data_files=[str(path)], split="train", **options)
    except Exception as error:  # the readers of the library raise what they like
        cause = error.__cause__ or error
        raise DataError(
            f"{path} cannot be read as {kind} ({type(cause).__name__}: {cause}). A whole file was "
            "expected, as its name says: check how it was written, or copy it again."
        ) from error


def _hub_table(name: str, folder: Path, *, split: str) -> Table:
    import datasets

    repo, _, revision = name.partition("@")
    try:
        rows = datasets.load_dataset(
            repo, revision=revision or None, split=split, cache_dir=str(folder)
        )
    except Exception as error:
        raise UserError(
            f"{PREFIX}{name} cannot be loaded ({type(error).__name__}: {error}). A data set of the "
            "hub was expected, or one in the library's cache where there is no network: check the "
            "name, download it first, or give a file, a folder or a pattern."
        ) from error
    return Table(f"{PREFIX}{name}", rows, str(rows._fingerprint))
