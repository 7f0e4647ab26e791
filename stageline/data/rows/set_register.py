"""The register of data sets in a file: name -> its files and how their rows are written.

The shape is that of LLaMA-Factory's dataset_info.json, as JSON or YAML. Knows nothing of rows.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stageline.data.rows.tables import HUB
from stageline.errors import UserError

FILE_NAME = "dataset_info.json"
# key -> types that its value may have
_KEYS: dict[str, tuple[type, ...]] = {
    "file_name": (str,),
    "formatting": (str,),
    "ranking": (bool,),
    "columns": (dict,),
    "tags": (dict,),
    "num_samples": (int,),
    "split": (str,),
}
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name", "script_url")
_UNREAD = ("subset", "folder")


@dataclass(frozen=True)
class SetInfo:
    """One data set.

    Attributes:
        name: what reports call its group.
        place: a file, folder or pattern, or `hub:owner/name`.
        formatting: of rows, as the converters call it.
        columns, tags: names in the rows, where they are not the usual ones.
        ranking: rows have a chosen and a rejected answer.
        num_samples: exactly so many rows are drawn; None: all.
        split: of a set of the hub.
        option: what named the place, for errors.
    """

    name: str
    place: str
    formatting: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    ranking: bool = False
    num_samples: int | None = None
    split: str = "train"
    option: str = "`dataset_path`"


def chosen_sets(
    info: str | Path, names: Sequence[str], *, option: str = "`dataset.names`"
) -> list[SetInfo]:
    """The named sets of a register.

    Args:
        info: the file, or a folder with a dataset_info.json.

    Raises:
        UserError: there is no such file or name, or an entry of it is not understood.
    """
    path = Path(info).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    entries = _read(path)
    if not names:
        raise UserError(
            f"{option} is missing. Names of {path} were expected, because it is a register of "
            f"sets: {_listed(entries)}."
        )
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UserError(
            f"{option} names {', '.join(twice)} more than once. Each set once was expected; for "
            "more of its rows give num_samples in the register, or probabilities."
        )
    for name in names:
        if name not in entries:
            raise UserError(
                f"{option} {name}: {path} has no such set.{_near(name, entries)} One of its names "
                f"was expected: {_listed(entries)}."
            )
    return [_entry(name, entries[name], path) for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"`dataset.info` {path} cannot be read ({error.strerror or error}). A file in the form "
            "of dataset_info.json was expected, as JSON or YAML: check the path."
        ) from error
    try:
        entries = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
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


def _entry(name: str, entry: Any, path: Path) -> SetInfo:
    place = f"{path}: the set {name!r}"
    if not isinstance(entry, dict):
        raise UserError(f'{place} is {entry!r}. An object was expected: {{"file_name": ...}}.')
    for key, value in entry.items():
        _check_key(place, str(key), value)
    if "file_name" not in entry:
        raise UserError(
            f"{place} has no file_name. A file, a folder or a pattern was expected there, relative "
            f"to {path.parent}, or {HUB}owner/name."
        )
    file = entry["file_name"]
    # joining keeps an absolute path what it is
    file = file if file.startswith(HUB) else str(path.parent / Path(file).expanduser())
    options = {key: value for key, value in entry.items() if key in _KEYS and value is not None}
    del options["file_name"]
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
            f'download it, or write "file_name": "{HUB}owner/name" for a set of the hub.'
        )
    if key in _UNREAD and value is None:
        return
    types = _KEYS.get(key)
    if types is None:
        raise UserError(
            f"{place} has the key {key!r}, which is not known.{_near(key, _KEYS)} Known are "
            f"{', '.join(_KEYS)}; others are refused, because a slip would be left out silently."
        )
    is_bool = isinstance(value, bool) and bool not in types
    if value is not None and (is_bool or not isinstance(value, types)):
        raise UserError(
            f"{place} has {key} {value!r}. A value of type {types[0].__name__} was expected."
        )


def _near(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _listed(entries: Mapping[str, Any]) -> str:
    names = list(entries)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
