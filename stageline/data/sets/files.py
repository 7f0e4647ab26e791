"""Finds the files of a data set: one, those of a folder, or those of a pattern; all of one kind.

Knows names of files only, never what is in them.
"""

import difflib
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stageline.errors import UserError

Kind = Literal["json", "jsonl", "csv", "text", "parquet", "arrow", "hub"]
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
HUB = "hub:"
_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json")  # beside files of rows
_PATTERN = "*?["


@dataclass(frozen=True)
class SetFiles:
    """The files of a set, sorted.

    Attributes:
        kind: of all of them; hub: `names` holds one name of a set of the hub.
        folder: that names of images are relative to.
    """

    kind: Kind
    names: tuple[str, ...]
    folder: Path

    @property
    def paths(self) -> list[Path]:
        """The files; none of a set of the hub."""
        return [] if self.kind == "hub" else [Path(name) for name in self.names]


def find_files(place: str, *, option: str = "--dataset-path") -> SetFiles:
    """The files that a path, a folder, a pattern or `hub:owner/name` names.

    Args:
        option: what named it, for errors.

    Raises:
        UserError: there is none, or they are of several kinds or of one that is not read.
    """
    if place.startswith(HUB):
        return SetFiles("hub", (place.removeprefix(HUB),), Path.cwd())
    path = Path(place).expanduser()
    if path.is_file():
        kind = _kind_of(path)
        if kind is None:
            raise _no_kind(path, option)
        return SetFiles(kind, (str(path),), path.parent)
    if path.is_dir():
        return _of_one_kind(place, sorted(path.iterdir()), folder=path, option=option)
    if any(sign in place for sign in _PATTERN):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        fixed = next(index for index, sign in enumerate(str(path)) if sign in _PATTERN)
        folder = Path(str(path)[:fixed] + "x").parent
        return _of_one_kind(place, found, folder=folder, option=option)
    raise UserError(
        f"{option} {place}: there is no such file or folder.{_near(path)} A file, a folder, a "
        f"pattern such as data/*.jsonl, or {HUB}owner/name was expected, because the rows of the "
        f"data set are there. Correct the path; it is relative to {Path.cwd()}."
    )


def _of_one_kind(place: str, found: Sequence[Path], *, folder: Path, option: str) -> SetFiles:
    files = [path for path in found if path.is_file() and _may_hold_rows(path)]
    kinds = {kind for path in files if (kind := _kind_of(path)) is not None}
    if len(kinds) > 1:
        examples = [next(path for path in files if _kind_of(path) == kind) for kind in kinds]
        raise UserError(
            f"{option} {place} has files of {len(kinds)} kinds: "
            f"{', '.join(sorted(path.name for path in examples))}. One kind was expected, because "
            "files of a set are read one like the other: give a pattern such as "
            f"{folder / ('*' + sorted(kinds)[0])}, or name each file as a set of its own."
        )
    if not kinds:
        there = ", ".join(path.name for path in found[:8]) or "nothing"
        raise UserError(
            f"{option} {place} names no file of rows; it has {there}. At least one file was "
            f"expected that ends in {' '.join(KIND_OF_SUFFIX)}. Correct the path."
        )
    kind = kinds.pop()
    names = tuple(str(path) for path in files if _kind_of(path) == kind)
    return SetFiles(kind, names, folder)


def _kind_of(path: Path) -> Kind | None:
    return KIND_OF_SUFFIX.get(path.suffix.lower())


def _may_hold_rows(path: Path) -> bool:
    return not path.name.startswith((".", "_")) and path.name not in _NO_ROWS


def _no_kind(path: Path, option: str) -> UserError:
    return UserError(
        f"{option} {path} ends in {path.suffix or 'nothing'}. One of "
        f"{' '.join(KIND_OF_SUFFIX)} was expected, because the ending says how a file is read: "
        "rename or convert it."
    )


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [item.name for item in path.parent.iterdir()])
    return f" Did you mean {path.parent / near[0]}?" if near else ""
