"""The `sets` dataset part: what the options say -> a dataset of one side, or a stream."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.data.rows.one_set import OneSet
from stageline.data.rows.readers import check_split
from stageline.data.rows.set_register import FILE_NAME, SetInfo, chosen_sets
from stageline.data.rows.stream import (
    FirstRows,
    Mix,
    StreamDataset,
    StreamSettings,
    check_mix,
    exactly,
    held_out,
    mixed,
)
from stageline.data.rows.tables import HUB
from stageline.errors import UserError
from stageline.seeds import derive_seed

# -- rows of one or more data sets as one map-style dataset; rows lie in mapped files -------------

VERSION = 1  # of how rows are drawn and converted


class SetsDataset:
    """Some rows of several sets, in a given order.

    Args:
        order: numbers of rows; those of the second set are numbered after the first's.
    """

    def __init__(self, sets: Sequence[OneSet], order: numpy.ndarray) -> None:
        self.sets = list(sets)
        self.order = order
        self._starts = numpy.cumsum([0, *(len(one) for one in sets)])

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        one, row = self._place(index)
        return one[row]

    def describe(self, index: int) -> str:
        """File and line of a row."""
        one, row = self._place(index)
        return one.describe(row)

    def fingerprint(self) -> str:
        """Tells whether another dataset has the same rows, wherever its files lie."""
        digest = hashlib.sha256(f"sets {VERSION}".encode())
        for one in self.sets:
            for fact in one.facts():
                digest.update(f" {fact}".encode())
        digest.update(self.order.tobytes())
        return digest.hexdigest()

    def rows(self) -> numpy.ndarray:
        """A number for each row: equal where the same row of a file came twice."""
        ends = numpy.cumsum([0, *(one.num_read for one in self.sets)])
        numbers = [one.rows + end for one, end in zip(self.sets, ends, strict=False)]
        return numpy.concatenate(numbers)[self.order]

    def _place(self, index: int) -> tuple[OneSet, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(self.order[index])
        one = int(numpy.searchsorted(self._starts, number, side="right")) - 1
        return self.sets[one], number - int(self._starts[one])


# -- which sets the options of the part `sets` choose, and how they are to be taken ---------------


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options that hold for all sets, as the part `sets` explains them."""

    formatting: str
    columns: dict[str, str]
    tags: dict[str, str]
    ranking: bool
    image_path: str | None
    num_frames: int
    cache: str | None
    num_samples: int | None
    max_samples: int | None
    mix: Mix
    probabilities: Sequence[float] | None
    val_size: int | float | None
    buffer_size: int
    seed: int

    def check(self, *, has_register: bool) -> None:
        """Refuses numbers below 1, and what a register says itself."""
        for name in ("num_samples", "max_samples", "num_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(
                    f"`dataset`.{name} {value}: at least 1 was expected, because so many rows are "
                    "taken. Leave it out, or give a larger one."
                )
        given = [
            name
            for name, is_given in (
                ("formatting", self.formatting != "auto"),
                ("columns", self.columns),
                ("tags", self.tags),
                ("ranking", self.ranking),
                ("num_samples", self.num_samples),
            )
            if is_given
        ]
        if has_register and given:
            raise UserError(
                f"`dataset`.{given[0]} came with a register of sets. It was expected there, in the "
                "entry of each set, because sets differ in it: move it into the register."
            )

    def of_path(self, place: str, *, name: str, option: str) -> SetInfo:
        """A set that is named by its files."""
        return SetInfo(
            name, place, self.formatting, self.columns, self.tags, self.ranking, self.num_samples,
            option=option,
        )  # fmt: skip

    def media(self) -> dict[str, Any]:
        """What rows' pictures and films are taken from, and how many."""
        return {"image_path": self.image_path, "num_frames": self.num_frames}

    def stream(self) -> StreamSettings:
        """The options of a stream."""
        return StreamSettings(
            media=self.media(),
            mix=self.mix,
            probabilities=self.probabilities,
            buffer_size=self.buffer_size,
            num_held_out=0 if self.val_size is None else self.val_size,
            has_limits=self.max_samples is not None,
            seed=self.seed,
        )


def train_infos(
    path: str | None, info: str | None, names: Sequence[str] | None, choices: Choices
) -> list[SetInfo]:
    """The sets to train on."""
    if info is None and names and path and (Path(path) / FILE_NAME).is_file():
        info = path
    if info is not None:
        return chosen_sets(info, names or [])
    if names:
        raise UserError(
            f"`dataset.names` {','.join(names)} came without a register of sets. `dataset.info` "
            f"with a file such as {FILE_NAME} was expected, or a `dataset_path` that has one."
        )
    if not path:
        raise UserError(
            "neither `dataset_path` nor `dataset.info` came. Files of rows or a register of sets "
            "were expected: give one of them."
        )
    return [choices.of_path(path, name=_name(path), option="`dataset_path`")]


def eval_infos(
    path: str | None,
    info: str | None,
    names: Sequence[str] | None,
    eval_path: str | None,
    choices: Choices,
) -> list[SetInfo] | None:
    """The sets to evaluate on; None where none are named."""
    if names and eval_path:
        raise UserError(
            "`dataset.eval_names` and `dataset.eval_path` came together. One of them was expected: "
            "put the files into the register, or leave the names out."
        )
    if eval_path:
        return [choices.of_path(eval_path, name=_name(eval_path), option="`dataset.eval_path`")]
    if not names:
        return None
    folder = info or path
    if folder is None:
        raise UserError("`dataset.eval_names` came without `dataset.info`, which has the names.")
    return chosen_sets(folder, names, option="`dataset.eval_names`")


def _name(place: str) -> str:
    """What a set is called that only its files name."""
    if place.startswith(HUB):
        return place.removeprefix(HUB)
    fixed = [part for part in Path(place).parts if not any(sign in part for sign in "*?[")]
    return Path(*fixed).stem if fixed else "all"


# -------------------------------------------------------------------------------------------------


class Sets:
    """Your own data sets: JSON, JSON lines, CSV, text, Parquet or Arrow; see docs/data.md.

    `dataset_path` is a file, a folder, a pattern, or hub:owner/name.

    Args:
        info: register of sets, as dataset_info.json; `dataset.names` chooses from it.
        names: sets of the register, a,b.
        formatting: how rows are written: alpaca, sharegpt, openai, text; auto: by their columns.
        columns: names of columns, {"prompt": "question"}.
        tags: words of messages, {"role_tag": "from"}.
        ranking: rows have a chosen and a rejected answer.
        image_path: folder that names of pictures are relative to; default: that of the files.
        num_frames: most pictures that are taken of a film, evenly.
        num_samples: exactly so many rows of the set are drawn, some twice if it has fewer.
        max_samples: at most so many rows of each set, its first.
        mix: all rows of each set; or one of each in turn until the first (under) or the last
            (over) set ends.
        probabilities: of the sets, where they are not to take turns.
        val_size: rows that are held out, as a number, or below 1 as a share.
        eval_names: sets of the register that are evaluated on.
        eval_path: files that are evaluated on.
        streaming: read the files as training goes, without an index of their rows.
        buffer_size: rows of a stream that are shuffled together; 1: none are.
        cache: folder of what is made of the files; default: that of the datasets library.
        seed: of all draws.
    """

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        info: str | None = None,
        names: list[str] | None = None,
        formatting: str = "auto",
        columns: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        ranking: bool = False,
        image_path: str | None = None,
        num_frames: int = 8,
        num_samples: int | None = None,
        max_samples: int | None = None,
        mix: Literal["concat", "interleave_under", "interleave_over"] = "concat",
        probabilities: list[float] | None = None,
        val_size: int | float | None = None,
        eval_names: list[str] | None = None,
        eval_path: str | None = None,
        streaming: bool = False,
        buffer_size: int = 16384,
        cache: str | None = None,
        seed: int = 0,
    ) -> None:
        check_split(split)
        choices = Choices(
            columns=dict(columns or {}),
            tags=dict(tags or {}),
            formatting=formatting,
            ranking=ranking,
            image_path=image_path,
            num_frames=num_frames,
            cache=cache,
            num_samples=num_samples,
            max_samples=max_samples,
            mix=mix,
            probabilities=probabilities,
            val_size=val_size,
            buffer_size=buffer_size,
            seed=seed,
        )
        choices.check(has_register=info is not None or bool(names))
        held = eval_infos(dataset_path, info, eval_names, eval_path, choices)
        _check_sides(split, val_size, held)
        self.is_stream = streaming and split == "train"
        self.rows: SetsDataset | StreamDataset | FirstRows
        if split == "test" and held is not None:
            self.rows = _loaded(held, choices, is_evaluation=True)
            return
        train = train_infos(dataset_path, info, names, choices)
        check_mix(mix, len(train), probabilities)
        if streaming:
            stream = StreamDataset(train, choices.stream())
            self.rows = stream if self.is_stream else FirstRows(stream)
        else:
            self.rows = _side(_loaded(train, choices), split, val_size, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        return self.rows[index]

    def describe(self, index: int) -> str:
        """File and line of a row."""
        return self.rows.describe(index)

    def fingerprint(self) -> str:
        """Tells whether another dataset has the same rows, wherever its files lie."""
        return self.rows.fingerprint()


def _check_sides(split: str, val_size: int | float | None, held: object) -> None:
    if held is not None and val_size is not None:
        raise UserError(
            "`dataset.val_size` came with sets to evaluate on (`dataset.eval_names` or eval_path). "
            "One of them was expected, because both say what is held out: leave one out."
        )
    if split == "test" and held is None and val_size is None:
        raise UserError(
            "there are no held-out rows. `dataset.val_size`, `dataset.eval_names` or "
            "`dataset.eval_path` was expected, because the data set has no split of its own: give "
            "one, or `eval_samples` 0 to train without evaluations."
        )


def _loaded(
    infos: Sequence[SetInfo], choices: Choices, *, is_evaluation: bool = False
) -> SetsDataset:
    loaded = []
    for info in infos:
        one = OneSet(info, cache=choices.cache, **choices.media())
        if info.num_samples is not None:
            # an evaluation sees each row once
            count = min(info.num_samples, len(one)) if is_evaluation else info.num_samples
            one.choose(exactly(len(one), count, seed=choices.seed, name=info.name))
        if choices.max_samples is not None:
            one.choose(numpy.arange(min(choices.max_samples, len(one))))
        loaded.append(one)
    mix, chances = ("concat", None) if is_evaluation else (choices.mix, choices.probabilities)
    order = mixed(
        [len(one) for one in loaded], mix, chances, seed=derive_seed(choices.seed, "mix") % 2**32
    )
    return SetsDataset(loaded, order)


def _side(dataset: SetsDataset, split: str, val_size: int | float | None, seed: int) -> SetsDataset:
    """The rows of one side; a row that was drawn twice is on one side only."""
    if val_size is None:
        return dataset
    rows = dataset.rows()
    held = held_out(rows, val_size, seed=seed)
    is_held = numpy.isin(rows, held)
    if split == "test":
        first = numpy.unique(rows, return_index=True)[1]
        return SetsDataset(dataset.sets, dataset.order[first[numpy.isin(rows[first], held)]])
    return SetsDataset(dataset.sets, dataset.order[~is_held])
