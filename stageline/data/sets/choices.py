"""Which sets the options of the part `sets` choose, and how they are to be taken."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageline.data.sets.files import HUB
from stageline.data.sets.info import FILE_NAME, SetInfo, chosen_sets
from stageline.data.sets.mixing import Mix
from stageline.data.sets.stream import StreamOptions
from stageline.errors import UserError


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
                    f"--dataset.{name} {value}: at least 1 was expected, because so many rows are "
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
                f"--dataset.{given[0]} came with a register of sets. It was expected there, in the "
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

    def stream(self) -> StreamOptions:
        """The options of a stream."""
        return StreamOptions(
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
            f"--dataset.names {','.join(names)} came without a register of sets. --dataset.info "
            f"with a file such as {FILE_NAME} was expected, or a --dataset-path that has one."
        )
    if not path:
        raise UserError(
            "neither --dataset-path nor --dataset.info came. Files of rows or a register of sets "
            "were expected: give one of them."
        )
    return [choices.of_path(path, name=_name(path), option="--dataset-path")]


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
            "--dataset.eval_names and --dataset.eval_path came together. One of them was expected: "
            "put the files into the register, or leave the names out."
        )
    if eval_path:
        return [choices.of_path(eval_path, name=_name(eval_path), option="--dataset.eval_path")]
    if not names:
        return None
    folder = info or path
    if folder is None:
        raise UserError("--dataset.eval_names came without --dataset.info, which has the names.")
    return chosen_sets(folder, names, option="--dataset.eval_names")


def _name(place: str) -> str:
    """What a set is called that only its files name."""
    if place.startswith(HUB):
        return place.removeprefix(HUB)
    fixed = [part for part in Path(place).parts if not any(sign in part for sign in "*?[")]
    return Path(*fixed).stem if fixed else "all"
