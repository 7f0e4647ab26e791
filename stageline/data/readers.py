"""Reads rows from JSON and JSON-lines files, each with its place for error messages.

And what dataset parts share: finding files, opening images lazily, splitting rows.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.images import bad_image
from stageline.errors import DataError, UserError


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

    def text(self, field: str) -> str:
        """The text of a field.

        Raises:
            DataError: it is missing or no text.
        """
        value = self.data.get(field)
        if isinstance(value, str):
            return value
        what = "is missing" if value is None else f"is {value!r}"
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
        DataError: names file and line of the first row that is no JSON object or list.
        UserError: there is no such file, or it has no rows.
    """
    if not path.is_file():
        raise UserError(
            f"there is no file {path}. The dataset's rows were expected there: check "
            "--dataset-path and the options of the dataset."
        )
    rows = _read_json(path) if path.suffix == ".json" else _read_json_lines(path)
    if not rows:
        raise DataError(f"{path} has no rows. At least one was expected: check --dataset-path.")
    for row in rows:
        if not isinstance(row.data, dict) and not (may_be_lists and isinstance(row.data, list)):
            raise DataError(
                f"{row.source}: the row is {str(row.data)[:60]!r}. A JSON object was expected, "
                "because its fields are the sample: correct the row."
            )
    return rows


def _read_json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                rows.append(Row(json.loads(text), f"{path}:{number}", number))
        except ValueError as error:
            raise DataError(
                f"{path}:{number}: {_reason(error)} in {line[:60]!r}. One JSON object a line was "
                "expected, in UTF-8, because each line is a sample: correct or delete the line."
            ) from error
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: {_reason(error)}. A JSON list of rows was expected: correct "
            "the line (a file of JSON lines ends in .jsonl)."
        ) from error
    if not isinstance(content, list):
        raise DataError(
            f"{path} holds a JSON {type(content).__name__}. A list of rows was expected, because "
            "each element is a sample: put the rows into one list."
        )
    return [
        Row(data, f"{path}: row {number}", number) for number, data in enumerate(content, start=1)
    ]


def _reason(error: ValueError) -> str:
    return f"not UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else f"no JSON ({error})"


def find_file(folder: Path, names: Iterable[str]) -> Path:
    """The first of several places below a folder where a file is.

    Raises:
        UserError: it is in none of them.
    """
    names = list(names)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"none of {', '.join(names)} lies in {folder}. One of them was expected, because the rows "
        "of the dataset are in it: point --dataset-path to the folder of the dataset."
    )


def dataset_folder(dataset_path: str | None, *, name: str) -> Path:
    """The folder or file that `--dataset-path` names.

    Raises:
        UserError: none was given, or it does not exist.
    """
    if not dataset_path or not Path(dataset_path).exists():
        raise UserError(
            f"--dataset-path {dataset_path or '(not given)'}: there is no such file or folder. "
            f"The dataset {name} was expected there, because it does not come with this program: "
            "download it and give its folder."
        )
    return Path(dataset_path)


def open_image(name: str, roots: Sequence[Path], *, source: str) -> Image.Image:
    """Opens an image without decoding it.

    Args:
        name: an absolute path, or one relative to one of `roots`.

    Raises:
        DataError: there is no such file, or its header is not that of a picture.
    """
    places = [root / name for root in roots]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise DataError(
            f"{source}: there is no image {name}. It was looked for at "
            f"{', '.join(map(str, places))}. Put the file there, or correct the row or the "
            "dataset's option for the folder of images."
        )
    try:
        return Image.open(path)
    except Exception as error:  # Pillow's readers raise anything
        raise bad_image(path, error, name=source) from error


def split_rows(
    rows: Sequence[Row],
    *,
    split: str,
    test_size: int | float,
    key: Callable[[Row], str] | None = None,
) -> list[Row]:
    """The rows of "train" or "test", by a fixed draw that does not depend on their order.

    Args:
        test_size: held-out rows as a number, or below 1 (or 1.0: all) as a share.
        key: rows of one key, such as an image, go to the same side.

    Raises:
        UserError: no row is left on the wanted side.
    """
    check_split(split)
    wanted = test_size if isinstance(test_size, int) else round(test_size * len(rows))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row) if key else str(row.number), []).append(row)
    test: set[int] = set()
    for name in sorted(groups, key=_draw):
        if len(test) >= wanted:
            break
        test.update(row.number for row in groups[name])
    chosen = [row for row in rows if (row.number in test) == (split == "test")]
    if not chosen:
        raise UserError(
            f"test_size {test_size} leaves no row for the split {split!r} of {len(rows)} rows. At "
            "least one was expected on each side that is used: choose another test_size."
        )
    return chosen


def check_split(split: str) -> None:
    """Refuses any split but train and test."""
    if split not in ("train", "test"):
        raise UserError(f"the split {split!r} is not known: it must be 'train' or 'test'.")


def _draw(key: str) -> str:
    return hashlib.sha256(f"split {key}".encode()).hexdigest()


class RowsDataset:
    """A dataset over rows of files; a subclass says what a row means.

    Every row is looked at once in the beginning, so that a bad one is found before a model is
    loaded. Images are only opened when a row is asked for, and not decoded.

    Args:
        rows: of this split.
        image_roots: folders that image names are relative to; the first that has the file wins.
    """

    def __init__(self, rows: Sequence[Row], *, image_roots: Sequence[Path]) -> None:
        self.rows = list(rows)
        self.image_roots = list(image_roots)
        for row in self.rows:
            self.convert(row)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        """Names of the row's images, or None, and its sample with at least an `id`.

        Raises:
            DataError: names the row's source.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Image.Image] | None, dict[str, Any]]:
        row = self.rows[index]
        names, sample = self.convert(row)
        sample["source"] = row.source
        if names is None:
            return None, sample
        return [open_image(name, self.image_roots, source=row.source) for name in names], sample

    def describe(self, index: int) -> str:
        """File and line of a row."""
        return self.rows[index].source
