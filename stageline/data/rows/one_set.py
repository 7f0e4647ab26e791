"""One data set: where its files are and how rows are written -> samples with id, source, group.

A register of sets has the shape of LLaMA-Factory's dataset_info.json, as JSON or YAML.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.converters import make_converter
from stageline.data.rows.json_lines import image_names
from stageline.data.rows.read_rows import (
    Row,
    SetFiles,
    TableRows,
    find_files,
    near_names,
    open_tables,
)
from stageline.data.rows.readers import RowsDataset
from stageline.errors import DataError, UserError
from stageline.hub import PREFIX, read_name

FILE_NAME = "dataset_info.json"
LOOKED_THROUGH = 100_000  # rows that are converted once in the beginning; of more, preflight's
_TYPE_OF_KEY: dict[str, type] = {
    "file_name": str,
    "formatting": str,
    "ranking": bool,
    "columns": dict,
    "tags": dict,
    "num_samples": int,
    "split": str,
}
_UNREAD = ("subset", "folder")  # LLaMA-Factory's own files have them as null


@dataclass(frozen=True)
class SetInfo:
    """One data set; how its rows are written is given as to `make_converter`."""

    name: str = ""  # the group of its rows in reports
    place: str = ""  # a file, folder or pattern, or `hub:owner/name[@revision]`
    formatting: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    ranking: bool = False
    num_samples: int | None = None  # exactly so many rows are drawn; None: all
    split: str = "train"  # of a set of the hub
    option: str = "`dataset_path`"  # what named the place, for errors


def chosen_sets(
    info: str | Path, names: Sequence[str], *, option: str = "`dataset.names`"
) -> list[SetInfo]:
    """Return the named sets of a register: of a file, or of a folder with a dataset_info.json.

    Raises:
        UserError: there is no such file or name, or an entry of it is not understood.
    """
    path = Path(info).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"`dataset.info` {path} cannot be read ({error}). Give a file such as {FILE_NAME}, as "
            "JSON or YAML."
        ) from error
    if not isinstance(entries, dict) or not entries:
        raise UserError(
            f"`dataset.info` {path} holds {type(entries).__name__}. Write an object, name of a set "
            '-> {"file_name": ...}.'
        )
    entries = {str(name): entry for name, entry in entries.items()}
    known = ", ".join([*entries][:20]) + f" and {len(entries) - 20} more" * (len(entries) > 20)
    if not names:
        raise UserError(f"{option} is missing. Give some of the names of {path}: {known}.")
    for name in names:
        if name not in entries:
            near = near_names(name, entries)
            raise UserError(f"{option} {name}: {path} has no such set.{near} It has {known}.")
        if list(names).count(name) > 1:
            raise UserError(
                f"{option} names {name} more than once. For more of its rows give num_samples in "
                "the register, or probabilities."
            )
    return [_read_entry(name, entries[name], path) for name in names]


def _read_entry(name: str, entry: Any, path: Path) -> SetInfo:
    place = f"{path}: the set {name!r}"
    if not isinstance(entry, dict):
        raise UserError(f'{place} is {entry!r}. Write an object: {{"file_name": ...}}.')
    for key, value in entry.items():
        if key in _UNREAD and value is None:
            continue
        if key not in _TYPE_OF_KEY:
            raise UserError(
                f"{place} has the key {key!r}, which is not known.{near_names(key, _TYPE_OF_KEY)} "
                f"Known keys are {', '.join(_TYPE_OF_KEY)}; a set of the hub is written as "
                f'"file_name": "{PREFIX}owner/name".'
            )
        if value is not None and type(value) is not _TYPE_OF_KEY[key]:
            kind = _TYPE_OF_KEY[key].__name__
            raise UserError(f"{place} has {key} {value!r}. Give a value of type {kind}.")
    options = {key: value for key, value in entry.items() if value is not None}
    file = options.pop("file_name", None)
    if file is None:
        raise UserError(
            f"{place} has no file_name. Give a file, a folder or a pattern, relative to "
            f"{path.parent}, or {PREFIX}owner/name."
        )
    if read_name(file, folder=path.parent) is not None:
        file = PREFIX + file.removeprefix(PREFIX)
    else:
        file = str(path.parent / Path(file).expanduser())  # an absolute path stays what it is
    if options.get("num_samples", 1) < 1:
        raise UserError(
            f"{place} has num_samples {options['num_samples']}. Give at least 1, or leave it out "
            "for all rows."
        )
    return SetInfo(name, file, option=f"{path}: {name}: file_name", **options)


class RowMaker(RowsDataset):
    """Makes samples of the rows of one set; holds no rows itself.

    Args:
        image_path: folder that names of images are relative to; by default that of the files,
            and `images` in it.
    """

    def __init__(
        self, info: SetInfo, *, image_path: str | None = None, num_frames: int = 8
    ) -> None:
        self.info = info
        self.files: SetFiles = find_files(info.place, option=info.option)
        self._convert = make_converter(
            info.formatting, columns=dict(info.columns), tags=dict(info.tags), ranking=info.ranking
        )
        folder = self.files.folder
        roots = [Path(image_path)] if image_path else [folder, folder / "images"]
        super().__init__([], image_roots=roots, num_frames=num_frames)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        sample = dict(self._convert(row.data, row.source))
        own = row.data.get("id")
        is_named = isinstance(own, str | int)
        sample["id"] = str(own) if is_named else f"{self.info.name}-{row.number}"
        sample["group"] = self.info.name
        return image_names(row.source, sample), sample

    def settings(self) -> str:
        """Return what decides how a row becomes a sample."""
        names = ("name", "formatting", "columns", "tags", "ranking")
        facts = {name: getattr(self.info, name) for name in names}
        return json.dumps({**facts, "num_frames": self._num_frames}, sort_keys=True)


class OneSet(RowMaker):
    """The good rows of a set, in the order of its files.

    Every row of a set that is not large is converted once, so that a bad one is found before a
    model is loaded; it ends the run, unless bad rows may be left out.

    Args:
        media: where images are, and how many of a video are taken, as `RowMaker` has it.
    """

    rows: TableRows

    def __init__(self, info: SetInfo, *, cache: str | None = None, **media: Any) -> None:
        super().__init__(info, **media)
        self.rows = rows = open_tables(self.files, cache=cache, hub_split=info.split)
        if len(rows) <= LOOKED_THROUGH:
            rows.numbers = rows.numbers[[self.is_good(row) for row in rows]]
        if len(rows) == 0:
            raise DataError(
                f"the data set {info.name!r} has no good row. Correct them:\n"
                f"{current_bad_rows().listed(5)}"
            )

    def facts(self) -> Sequence[str]:
        """Return what tells whether another set has the same rows, wherever its files are."""
        digest = hashlib.sha256(self.rows.numbers.tobytes()).hexdigest()
        return [self.settings(), *(table.digest for table in self.rows.tables), digest]
