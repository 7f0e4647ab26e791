"""What the public sets share: rows that are refused with their sample, folders of pictures."""

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from stageline.data.rows.readers import Row, RowsDataset
from stageline.errors import DataError

Others = Literal["error", "allow"]  # what becomes of a relation or task that is not known


class SpatialRows(RowsDataset):
    """Rows of a public set; a subclass says the id of a row and reads the rest."""

    def convert(self, row: Row) -> tuple[list[str], dict[str, Any]]:
        """Names of the row's images and its sample.

        Raises:
            DataError: names file, line and sample.
        """
        sample_id = self.sample_id(row)
        images, sample = self.read(Named(row, sample_id))
        return images, {"id": sample_id, "cluster": images[0], **sample}

    def sample_id(self, row: Row) -> str:
        """The id; told with every error of the row."""
        raise NotImplementedError

    def read(self, row: "Named") -> tuple[list[str], dict[str, Any]]:
        """Names of the row's images and its sample but for the id."""
        raise NotImplementedError


class Named:
    """A row and the id of its sample.

    Attributes:
        source: file, line and sample, which every error begins with.
    """

    def __init__(self, row: Row, sample_id: str) -> None:
        self.row = row
        self.data: Any = row.data
        self.source = f"{row.source}: sample {sample_id}"

    def text(self, field: str) -> str:
        """The text of a field that may not be empty.

        Raises:
            DataError: it is missing, no text, or blank.
        """
        value = self.data.get(field)
        if isinstance(value, str) and value.strip():
            return value
        what = "is missing" if value is None else f"is {repr(value)[:60]}"
        raise self.bad(
            f"the field {field!r} {what}. Text was expected, because the prompt is made from it; "
            f"the row has the fields {', '.join(sorted(map(str, self.data))) or 'none'}"
        )

    def known(self, value: Any, names: Collection[str], *, what: str, others: Others) -> str:
        """A relation or task in lower case, one of `names` unless others are allowed.

        Raises:
            DataError: it is none; the nearest names are told.
        """
        if not isinstance(value, str) or not value.strip():
            raise self.bad(
                f"the {what} is {'missing' if value is None else repr(value)[:60]}. A text was "
                f"expected, because figures are given for each {what}"
            )
        name = " ".join(value.lower().split())
        if others == "allow" or name in names:
            return name
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        listed = ", ".join(sorted(names)) if len(names) <= 12 else f"{len(names)} are known"
        hint = f" (nearest: {', '.join(near)})" if near else f" ({listed})"
        raise self.bad(
            f"the {what} {value[:60]!r} is not known{hint}. A known one was expected, because a "
            "misspelt one would make a group of its own",
            more=f", or allow others with `dataset.other_`{what}s allow",
        )

    def bad(self, what: str, *, more: str = "") -> DataError:
        """An error that begins with file, line and sample, and says to correct the row."""
        return DataError(f"{self.source}: {what}: correct the row{more}.")


def image_roots(folder: Path, image_path: str | None, *names: str) -> list[Path]:
    """Where pictures are looked for: the given folder alone, or the usual ones."""
    if image_path:
        return [Path(image_path)]
    folder = folder if folder.is_dir() else folder.parent
    return [folder, *(folder / name for name in names), folder.parent]


def check_options(row: Named, options: Sequence[str]) -> None:
    """Refuses fewer than two options, and two that read the same.

    Raises:
        DataError: names the row.
    """
    texts = [" ".join(option.lower().split()) for option in options]
    double = next((text for i, text in enumerate(texts) if text in texts[:i]), None)
    if double is not None:
        raise row.bad(
            f"the option {double!r} stands twice among {list(options)!r}. Options that differ were "
            "expected, because only one of them is right"
        )
    if len(options) < 2 or "" in texts:
        raise row.bad(
            f"the options are {list(options)!r}. At least two texts were expected, because the "
            "model chooses among them"
        )


# -- the relations of the public sets, as data ----------------------------------------------------
# VSR: the categories of the authors' `analysis_scripts/rel_meta_category_dict.txt` in
# github.com/cambridgeltl/visual-spatial-reasoning, which are those of Liu, Emerson and Collier,
# "Visual Spatial Reasoning" (TACL 2023), table 1. "among" stands there in two categories; here it
# is topological.

_VSR: dict[str, str] = {
    "adjacency": "adjacent to, alongside, at the side of, at the right side of, at the left side "
    "of, attached to, at the back of, ahead of, against, at the edge of",
    "directional": "off, past, toward, down, deep down, up, away from, along, around, from, into, "
    "to, across, across from, through, down from",
    "orientation": "facing, facing away from, parallel to, perpendicular to",
    "projective": "on top of, beneath, beside, behind, left of, right of, under, in front of, "
    "below, above, over, in the middle of",
    "proximity": "by, close to, near, far from, far away from",
    "topological": "connected to, detached from, has as a part, part of, contains, within, at, on, "
    "in, with, surrounding, among, consists of, out of, between, inside, outside, touching",
    "unallocated": "beyond, next to, opposite to, after, enclosed by",
}
# relation -> category
VSR_RELATIONS: dict[str, str] = {
    relation: category for category, names in _VSR.items() for relation in names.split(", ")
}

# What'sUp: the prepositions by which the authors' evaluation splits its figures
# (github.com/amitakamath/whatsup_vlms, dataset_zoo/aro_datasets.py); in this order, since "on the
# left" says left
PREPOSITIONS = (
    *("left", "right", "front", "behind", "under", "above", "below", "top", "bottom", "on"),
)
# the pair of one set of two objects that a preposition belongs to
PAIRS = {
    **{"left": "left and right", "right": "left and right", "on": "on and under"},
    **{"under": "on and under", "front": "front and behind", "behind": "front and behind"},
}
