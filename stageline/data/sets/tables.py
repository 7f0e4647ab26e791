"""A file of rows as a table of the `datasets` library, mapped into memory and not read into it.

A file that people write (JSON, CSV, text) is read once, strictly, into an Arrow file of a cache
folder; every process that opens it later finds it there. Parquet and Arrow files are the
library's to load.
"""

import functools
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from stageline.data.bad_rows import BadRows, current_bad_rows, leaving_out
from stageline.data.row_files import RowFileReader
from stageline.data.sets.files import HUB, Kind, SetFiles
from stageline.data.sets.text_rows import text_rows
from stageline.errors import DataError, UserError

if TYPE_CHECKING:  # takes a second to import, and most runs have no use for it
    from datasets import Dataset

VERSION = 1  # of what is kept of a file
_MOST_BAD = 100_000  # rows of one file; more, and it is none


@dataclass(frozen=True)
class Table:
    """The rows of one file.

    Attributes:
        name: of the file, as it was given.
        digest: SHA-256 of the file's bytes, or what the library calls a set of the hub.
        is_text: `rows` holds rows as JSON, with their lines; else the rows themselves.
        has_lines: a row's number is its line.
        bad: source -> reason of rows that could not be read.
    """

    name: str
    rows: "Dataset"
    digest: str
    is_text: bool = False
    has_lines: bool = False
    bad: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def _columns(self) -> dict[str, Any]:
        # the library takes twenty times as long to hand out a row
        return {name: self.rows.data.column(name) for name in self.rows.column_names}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], str]:
        """(row, source) of a row."""
        if not self.is_text:
            return without_none(self.rows[index]), self.source(index)
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

    Raises:
        DataError: a file or a row of it cannot be read.
    """
    import datasets

    folder = Path(cache or datasets.config.HF_DATASETS_CACHE)
    if files.kind == "hub":
        return [_hub_table(files.names[0], folder, split=hub_split)]
    tables = [
        _text_table(path, files.kind, folder)
        if files.kind in ("json", "jsonl", "csv", "text")
        else _library_table(path, files.kind, folder)
        for path in files.paths
    ]
    for table in tables:
        for source, reason in table.bad.items():
            current_bad_rows().take(source, DataError(reason))
    return tables


def without_none(value: Any) -> Any:
    """A value without the keys that are None, at any depth.

    In tables all rows have the same keys, so a tool's arguments would get those of all others.
    """
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def stream_library(path: Path, kind: Kind) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, source) of a Parquet or Arrow file, a few rows in memory at a time."""
    rows = _load(kind, path, streaming=True)
    for number, row in enumerate(rows, 1):
        yield without_none(row), f"{path}: row {number}"


def _text_table(path: Path, kind: Kind, folder: Path) -> Table:
    now = path.stat()
    facts = (VERSION, kind, str(path.absolute()), now.st_size, now.st_mtime_ns)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    place = folder / "stageline-rows" / f"{key}.arrow"
    found = _known(place)
    if found is None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{place}.lock"):  # other ranks wait for what the first one makes
                found = _known(place) or _make(path, kind, place)
        except OSError as error:
            raise _no_room(place.parent, error) from error
    rows, kept = found
    return Table(
        str(path),
        rows,
        kept["digest"],
        is_text=True,
        has_lines=kind != "json",
        # their file may have been named in another way then
        bad={source.replace(kept["name"], str(path)): why for source, why in kept["bad"]},
    )


def _known(place: Path) -> "tuple[Dataset, dict[str, Any]] | None":
    """What was made of a file, if it is whole."""
    import datasets

    try:
        kept = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
        if place.stat().st_size != kept["bytes"]:
            return None
        rows = datasets.Dataset.from_file(str(place))
        return (rows, kept) if len(rows) == kept["num_rows"] else None
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
            "name": str(path),
            "digest": file.digest,
            "num_rows": num_rows,
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
            f"{path} cannot be read as {kind} ({type(cause).__name__}: {cause}). A whole {kind} "
            "file was expected, as its name says: check how it was written, or copy it again."
        ) from error


def _hub_table(name: str, folder: Path, *, split: str) -> Table:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split, cache_dir=str(folder))
    except Exception as error:
        raise UserError(
            f"{HUB}{name} cannot be loaded ({type(error).__name__}: {error}). A data set of the "
            "hub was expected, or one in the library's cache where there is no network: check the "
            "name, download it first, or give a file, a folder or a pattern."
        ) from error
    return Table(f"{HUB}{name}", rows, str(rows._fingerprint))


def _no_room(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"what is made of the data files cannot be kept in {folder} ({error.strerror or error}). A "
        "folder that can be written to was expected, because rows are mapped into memory from "
        "there: name another one with --dataset.cache, or make room."
    )
