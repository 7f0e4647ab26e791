"""The `sets` dataset part: rows of one or more data sets as one dataset of a side, or a stream."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.data.rows.one_set import FILE_NAME, OneSet, SetInfo, chosen_sets, place_of
from stageline.data.rows.readers import check_split
from stageline.data.rows.stream import (
    FirstRows,
    StreamDataset,
    check_mix,
    exactly,
    held_out,
    mixed,
)
from stageline.errors import UserError
from stageline.hub import read_name
from stageline.seeds import derive_seed

VERSION = 1  # of how rows are drawn and converted


class SetsDataset:
    """Some rows of several sets, in a given order; they lie in mapped files.

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

    def side(self, split: str, val_size: int | float, *, seed: int) -> "SetsDataset":
        """The rows of one side; a row that was drawn twice is on one side only."""
        rows = self.rows()
        held = held_out(rows, val_size, seed=seed)
        if split == "train":
            return SetsDataset(self.sets, self.order[~numpy.isin(rows, held)])
        first = numpy.unique(rows, return_index=True)[1]
        return SetsDataset(self.sets, self.order[first[numpy.isin(rows[first], held)]])

    def _place(self, index: int) -> tuple[OneSet, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        one, row = place_of(self._starts, int(self.order[index]))
        return self.sets[one], row


class Sets:
    """Your own data sets: JSON, JSON lines, CSV, text, Parquet or Arrow; see docs/data.md.

    `dataset_path` is a file, a folder, a pattern, or hub:owner/name[@revision].

    Args:
        info: register of sets, as dataset_info.json; `dataset.names` chooses from it.
        names: sets of the register, a,b.
        formatting: how rows are written: alpaca, sharegpt, openai, text; auto: by their columns.
        columns: names of columns, {"prompt": "question"}.
        tags: words of messages, {"role_tag": "from"}.
        ranking: rows have a chosen and a rejected answer.
        image_path: folder that names of images are relative to; default: that of the files.
        num_frames: most images that are taken of a video, evenly.
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
        numbers = {"num_samples": num_samples, "max_samples": max_samples, "num_frames": num_frames}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise UserError(
                    f"`dataset`.{name} {value}: at least 1 was expected, because so many are "
                    "taken. Leave it out, or give a larger one."
                )
        self._own = SetInfo(
            formatting=formatting,
            columns=dict(columns or {}),
            tags=dict(tags or {}),
            ranking=ranking,
            num_samples=num_samples,
        )
        if info is not None or names:
            _refuse_beside_register(self._own)
        self._media: dict[str, Any] = {"image_path": image_path, "num_frames": num_frames}
        self._cache, self._max_samples, self._seed = cache, max_samples, seed
        self._mix, self._probabilities = mix, probabilities
        held = self._eval_infos(dataset_path, info, eval_names, eval_path)
        _check_sides(split, val_size, held)
        self.is_stream = streaming and split == "train"
        self.rows: SetsDataset | StreamDataset | FirstRows
        if split == "test" and held is not None:
            self.rows = self._load(held, is_evaluation=True)
            return
        train = self._train_infos(dataset_path, info, names)
        check_mix(mix, len(train), probabilities)
        if streaming:
            stream = self._stream(train, buffer_size, val_size)
            self.rows = stream if self.is_stream else FirstRows(stream)
        else:
            loaded = self._load(train)
            self.rows = loaded if val_size is None else loaded.side(split, val_size, seed=seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        return self.rows[index]

    def describe(self, index: int) -> str:
        return self.rows.describe(index)

    def fingerprint(self) -> str:
        return self.rows.fingerprint()

    def _stream(
        self, infos: Sequence[SetInfo], buffer_size: int, val_size: int | float | None
    ) -> StreamDataset:
        if self._max_samples is not None or any(info.num_samples is not None for info in infos):
            raise UserError(
                "num_samples or max_samples came with `dataset.streaming`. Neither was expected, "
                "because a stream has no rows to choose from: leave it out, or read the files as "
                "a whole."
            )
        return StreamDataset(
            infos,
            media=self._media,
            mix=self._mix,
            probabilities=self._probabilities,
            buffer_size=buffer_size,
            val_size=val_size,
            seed=self._seed,
        )

    def _train_infos(
        self, path: str | None, info: str | None, names: Sequence[str] | None
    ) -> list[SetInfo]:
        if info is None and names and path and (Path(path) / FILE_NAME).is_file():
            info = path
        if info is not None:
            return chosen_sets(info, names or [])
        if names:
            raise UserError(
                f"`dataset.names` {','.join(names)} came without a register of sets. One was "
                "expected, because it says where the named sets are: give `dataset.info` a file "
                f"such as {FILE_NAME}, or a `dataset_path` that has one."
            )
        if not path:
            raise UserError(
                "neither `dataset_path` nor `dataset.info` came. Files of rows or a register of "
                "sets were expected, because rows are read from them: give one of them."
            )
        return [self._set_of(path, option="`dataset_path`")]

    def _eval_infos(
        self,
        path: str | None,
        info: str | None,
        names: Sequence[str] | None,
        eval_path: str | None,
    ) -> list[SetInfo] | None:
        """The sets to evaluate on; None where none are named."""
        if names and eval_path:
            raise UserError(
                "`dataset.eval_names` and `dataset.eval_path` came together. One of them was "
                "expected, because both say what is evaluated: put the files into the register, or "
                "leave the names out."
            )
        if eval_path:
            return [self._set_of(eval_path, option="`dataset.eval_path`")]
        if not names:
            return None
        folder = info or path
        if folder is None:
            raise UserError(
                "`dataset.eval_names` came without `dataset.info`, which has the names."
            )
        return chosen_sets(folder, names, option="`dataset.eval_names`")

    def _set_of(self, place: str, *, option: str) -> SetInfo:
        """A set that only its files name."""
        known = read_name(place)
        if known is not None:
            name = known.repo
        else:
            fixed = [part for part in Path(place).parts if not any(sign in part for sign in "*?[")]
            name = Path(*fixed).stem if fixed else "all"
        return replace(self._own, name=name, place=place, option=option)

    def _load(self, infos: Sequence[SetInfo], *, is_evaluation: bool = False) -> SetsDataset:
        loaded = []
        for info in infos:
            one = OneSet(info, cache=self._cache, **self._media)
            if info.num_samples is not None:
                # an evaluation sees each row once
                count = min(info.num_samples, len(one)) if is_evaluation else info.num_samples
                one.rows = one.rows[exactly(len(one), count, seed=self._seed, name=info.name)]
            if self._max_samples is not None:
                one.rows = one.rows[: self._max_samples]
            loaded.append(one)
        mix = "concat" if is_evaluation else self._mix
        seed = derive_seed(self._seed, "mix") % 2**32
        order = mixed([len(one) for one in loaded], mix, self._probabilities, seed=seed)
        return SetsDataset(loaded, order)


def _refuse_beside_register(own: SetInfo) -> None:
    """Refuses options that a register says itself."""
    usual = SetInfo()
    given = [name for name, value in vars(own).items() if value != getattr(usual, name)]
    if given:
        raise UserError(
            f"`dataset`.{given[0]} came with a register of sets. It was expected there, in the "
            "entry of each set, because sets differ in it: move it into the register."
        )


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
