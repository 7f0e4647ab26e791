"""One data set: where its files are and how rows are written -> samples with id, source, group.

A register of sets has the shape of LLaMA-Factory's dataset_info.json, as JSON or YAML.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import yaml

from stageline.data.images.image_files import ImageFolders
from stageline.data.images.videos import with_videos
from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.converters import make_converter
from stageline.data.rows.json_lines import image_names
from stageline.data.rows.tables import SetFiles, find_files, near_names, open_tables
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
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name", "script_url")
_UNREAD = ("subset", "folder")  # LLaMA-Factory's own files have them as null


@dataclass(frozen=True)
class SetInfo:
    """One data set; how its rows are written is said as to `make_converter`."""

    name: str = ""  # what reports call its group
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
    """The named sets of a register: of a file, or of a folder with a dataset_info.json.

    Raises:
        UserError: there is no such file or name, or an entry of it is not understood.
    """
    path = Path(info).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    entries = _read_register(path)
    known = ", ".join([*entries][:20]) + f" and {len(entries) - 20} more" * (len(entries) > 20)
    if not names:
        raise UserError(
            f"{option} is missing. Names of {path} were expected, because it is a register of "
            f"sets: give some of {known}."
        )
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UserError(
            f"{option} names {', '.join(twice)} more than once. Each set once was expected, "
            "because all its rows come with it; for more of them give num_samples in the register, "
            "or probabilities."
        )
    for name in names:
        if name not in entries:
            raise UserError(
                f"{option} {name}: {path} has no such set.{near_names(name, entries)} One of its "
                f"names was expected: {known}."
            )
    return [_read_entry(name, entries[name], path) for name in names]


def _read_register(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UserError(
            f"`dataset.info` {path} cannot be read ({error.strerror or error}). A file as "
            "dataset_info.json was expected, as JSON or YAML: check the path."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"`dataset.info` {path} is no {path.suffix[1:] or 'YAML'}: {error}"
        ) from error
    if not isinstance(entries, dict) or not entries:
        raise UserError(
            f"`dataset.info` {path} holds {type(entries).__name__}. An object was expected, name "
            'of a set -> {"file_name": ...}.'
        )
    return {str(name): entry for name, entry in entries.items()}


def _read_entry(name: str, entry: Any, path: Path) -> SetInfo:
    place = f"{path}: the set {name!r}"
    if not isinstance(entry, dict):
        raise UserError(f'{place} is {entry!r}. An object was expected: {{"file_name": ...}}.')
    for key, value in entry.items():
        _check_key(place, str(key), value)
    if entry.get("file_name") is None:
        raise UserError(
            f"{place} has no file_name. A file, a folder or a pattern was expected there, relative "
            f"to {path.parent}, or {PREFIX}owner/name, because its rows are read from it: add it."
        )
    options = {key: value for key, value in entry.items() if value is not None}
    file = options.pop("file_name")
    # joining keeps an absolute path what it is
    if read_name(file, folder=path.parent) is not None:
        file = PREFIX + file.removeprefix(PREFIX)
    else:
        file = str(path.parent / Path(file).expanduser())
    if options.get("num_samples", 1) < 1:
        raise UserError(
            f"{place} has num_samples {options['num_samples']}. At least 1 was expected, because "
            "so many of its rows are drawn: leave it out for all of them."
        )
    return SetInfo(name, file, option=f"{path}: {name}: file_name", **options)


def _check_key(place: str, key: str, value: Any) -> None:
    if key in _ELSEWHERE:
        raise UserError(
            f"{place} has {key}. A file_name was expected, because sets are read from files: "
            f'download it, or write "file_name": "{PREFIX}owner/name" for a set of the hub.'
        )
    if key in _UNREAD and value is None:
        return
    if key not in _TYPE_OF_KEY:
        raise UserError(
            f"{place} has the key {key!r}, which is not known.{near_names(key, _TYPE_OF_KEY)} "
            f"Known are {', '.join(_TYPE_OF_KEY)}; others are refused, because a slip would be "
            "left out silently."
        )
    if value is not None and type(value) is not _TYPE_OF_KEY[key]:
        kind = _TYPE_OF_KEY[key].__name__
        raise UserError(f"{place} has {key} {value!r}. A value of type {kind} was expected.")


class RowMaker:
    """Makes samples of the rows of one set; holds no rows.

    Args:
        image_path: folder that names of images are relative to; by default that of the files,
            and `images` in it.
        num_frames: most images that are taken of a video.
    """

    def __init__(
        self, info: SetInfo, *, image_path: str | None = None, num_frames: int = 8
    ) -> None:
        self.info = info
        self.files: SetFiles = find_files(info.place, option=info.option)
        self._num_frames = num_frames
        self._convert = make_converter(
            info.formatting, columns=dict(info.columns), tags=dict(info.tags), ranking=info.ranking
        )
        folder = self.files.folder
        self._folders = ImageFolders(
            [Path(image_path)] if image_path else [folder, folder / "images"]
        )

    def convert(
        self, row: dict[str, Any], source: str, *, number: int
    ) -> tuple[list[str] | None, dict[str, Any]]:
        """Names of the row's images, or None, and its sample; `number` names one without `id`."""
        sample = dict(self._convert(row, source))
        own = row.get("id")
        sample["id"] = str(own) if isinstance(own, str | int) else f"{self.info.name}-{number}"
        sample["source"] = source
        sample["group"] = self.info.name
        names = image_names(source, sample)
        videos = [[name] if isinstance(name, str) else name for name in sample.get("videos") or ()]
        for name in [*(names or ()), *itertools.chain(*videos)]:
            self._folders.check_name(name, source=source)
        return names, sample

    def is_good(self, row: dict[str, Any], source: str) -> bool:
        """Whether a row can be converted; else it goes to `current_bad_rows`."""
        try:
            self.convert(row, source, number=0)
        except DataError as error:
            current_bad_rows().take(source, error)
            return False
        return True

    def make(
        self, row: dict[str, Any], source: str, *, number: int
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """The row's images, opened and not decoded, and its sample."""
        names, sample = self.convert(row, source, number=number)
        images = [self._folders.open(name, source=source) for name in names or ()]
        options: dict[str, Any] = {"folders": self._folders, "num_frames": self._num_frames}
        return with_videos(sample, images or None, source=source, **options)

    def settings(self) -> str:
        """What decides how a row becomes a sample."""
        names = ("name", "formatting", "columns", "tags", "ranking")
        facts = {name: getattr(self.info, name) for name in names}
        return json.dumps({**facts, "num_frames": self._num_frames}, sort_keys=True)


def place_of(starts: numpy.ndarray, number: int) -> tuple[int, int]:
    """(which part, row in it) of a row that is numbered over parts with these first rows."""
    part = int(numpy.searchsorted(starts, number, side="right")) - 1
    return part, number - int(starts[part])


class OneSet:
    """The good rows of a set, in the order of its files.

    Every row of a set that is not large is converted once, so that a bad one is found before a
    model is loaded; it ends the run, unless bad rows may be left out.

    Args:
        media: where images are, and how many of a video are taken, as `RowMaker` has it.

    Attributes:
        rows: numbers of the good rows, over all files.
        num_read: rows of the files, bad ones too.
    """

    def __init__(self, info: SetInfo, *, cache: str | None = None, **media: Any) -> None:
        self.maker = RowMaker(info, **media)
        self.tables = open_tables(self.maker.files, cache=cache, hub_split=info.split)
        self._starts = numpy.cumsum([0, *(len(table) for table in self.tables)])
        self.num_read = int(self._starts[-1])
        self.rows = numpy.arange(self.num_read, dtype=numpy.int64)
        if self.num_read <= LOOKED_THROUGH:
            is_good = [self.maker.is_good(*self._read(int(row))) for row in self.rows]
            self.rows = self.rows[numpy.array(is_good, dtype=bool)]
        if len(self.rows) == 0:
            raise DataError(
                f"the data set {info.name!r} has no good row. At least one was expected:\n"
                f"{current_bad_rows().listed(5)}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        number = int(self.rows[index])
        return self.maker.make(*self._read(number), number=number)

    def describe(self, index: int) -> str:
        table, place = place_of(self._starts, int(self.rows[index]))
        return self.tables[table].source(place)

    def facts(self) -> Sequence[str]:
        """What tells whether another set has the same rows, wherever its files lie."""
        digest = hashlib.sha256(self.rows.tobytes()).hexdigest()
        return [self.maker.settings(), *(table.digest for table in self.tables), digest]

    def _read(self, number: int) -> tuple[dict[str, Any], str]:
        table, place = place_of(self._starts, number)
        return self.tables[table][place]
