"""The `sets` dataset part: rows of one or more data sets as one dataset of a side, or a stream."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy

from stageline.data.rows.one_set import FILE_NAME, OneSet, RowMaker, SetInfo, chosen_sets
from stageline.data.rows.read_rows import part_of
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

_VERSION = 1  # of how rows are drawn and converted


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
        """Return file and line of a row."""
        one, row = self._place(index)
        return one.describe(row)

    def fingerprint(self) -> str:
        """Return what tells whether another dataset has the same rows, wherever its files are."""
        digest = hashlib.sha256(f"sets {_VERSION}".encode())
        for one in self.sets:
            for fact in one.facts():
                digest.update(f" {fact}".encode())
        digest.update(self.order.tobytes())
        return digest.hexdigest()

    def side(self, split: str, val_size: int | float, *, seed: int) -> "SetsDataset":
        """Return the rows of one side; a row that was drawn twice is on one side only."""
        ends = numpy.cumsum([0, *(one.rows.num_read for one in self.sets)])
        numbers = [one.rows.numbers + end for one, end in zip(self.sets, ends, strict=False)]
        rows = numpy.concatenate(numbers)[self.order]  # equal where a row of a file came twice
        held = held_out(rows, val_size, seed=seed)
        if split == "train":
            return SetsDataset(self.sets, self.order[~numpy.isin(rows, held)])
        first = numpy.unique(rows, return_index=True)[1]
        return SetsDataset(self.sets, self.order[first[numpy.isin(rows[first], held)]])

    def _place(self, index: int) -> tuple[OneSet, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        one, row = part_of(self._starts, int(self.order[index]))
        return self.sets[one], row


def read_sets(
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
) -> SetsDataset | StreamDataset | FirstRows:
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
    check_split(split)
    counts = {"num_samples": num_samples, "max_samples": max_samples, "num_frames": num_frames}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"`dataset`.{name} {value}: at least 1 is needed. Raise or drop it.")
    own = SetInfo(
        formatting=formatting,
        columns=dict(columns or {}),
        tags=dict(tags or {}),
        ranking=ranking,
        num_samples=num_samples,
    )
    given = [name for name, value in vars(own).items() if value != getattr(SetInfo(), name)]
    if given and (info is not None or names):
        raise UserError(
            f"`dataset`.{given[0]} came with a register of sets. Write it into the entry of each "
            "set there."
        )
    if eval_names and eval_path:
        raise UserError(
            "`dataset.eval_names` and `dataset.eval_path` came together. Put the files into the "
            "register, or leave the names out."
        )
    has_eval = bool(eval_names or eval_path)
    if has_eval and val_size is not None:
        raise UserError(
            "`dataset.val_size` came with sets to evaluate on (`dataset.eval_names` or eval_path). "
            "Leave one out."
        )
    if split == "test" and not has_eval and val_size is None:
        raise UserError(
            "there are no held-out rows. Give `dataset.val_size`, `dataset.eval_names` or "
            "`dataset.eval_path`, or `eval_samples` 0 to train without evaluations."
        )
    media: dict[str, Any] = {"image_path": image_path, "num_frames": num_frames}

    def load(infos: Sequence[SetInfo], mix: Any) -> SetsDataset:
        loaded = []
        for one_info in infos:
            one = OneSet(one_info, cache=cache, **media)
            count = one_info.num_samples
            if count is not None:
                if split == "test" and has_eval:  # an evaluation sees each row once
                    count = min(count, len(one))
                drawn = exactly(len(one), count, seed=seed, name=one_info.name)
                one.rows.numbers = one.rows.numbers[drawn]
            one.rows.numbers = one.rows.numbers[:max_samples]
            loaded.append(one)
        mix_seed = derive_seed(seed, "mix") % 2**32
        order = mixed([len(one) for one in loaded], mix, probabilities, seed=mix_seed)
        return SetsDataset(loaded, order)

    # sets to evaluate on
    if split == "test" and eval_path:
        return load([_set_of(eval_path, own, option="`dataset.eval_path`")], "concat")
    if split == "test" and eval_names:
        if info is None and dataset_path is None:
            raise UserError("`dataset.eval_names` came without `dataset.info`, its register.")
        infos = chosen_sets(info or str(dataset_path), eval_names, option="`dataset.eval_names`")
        return load(infos, "concat")

    # sets to train on, of which some rows may be held out
    if info is None and names and dataset_path and (Path(dataset_path) / FILE_NAME).is_file():
        info = dataset_path
    if info is not None:
        infos = chosen_sets(info, names or [])
    elif names:
        raise UserError(
            f"`dataset.names` {','.join(names)} came without a register of sets. Give "
            f"`dataset.info` a file such as {FILE_NAME}, or a `dataset_path` that has one."
        )
    elif dataset_path:
        infos = [_set_of(dataset_path, own)]
    else:
        raise UserError("neither `dataset_path` nor `dataset.info` came. Give one of them.")
    check_mix(mix, len(infos), probabilities)
    if not streaming:
        loaded = load(infos, mix)
        return loaded if val_size is None else loaded.side(split, val_size, seed=seed)
    if max_samples is not None or any(one.num_samples is not None for one in infos):
        raise UserError(
            "num_samples or max_samples came with `dataset.streaming`. Leave it out, or read the "
            "files as a whole."
        )
    stream = StreamDataset(
        [RowMaker(one, **media) for one in infos],
        mix=mix,
        probabilities=probabilities,
        buffer_size=buffer_size,
        val_size=val_size,
        seed=seed,
    )
    return stream if split == "train" else FirstRows(stream)


def _set_of(place: str, own: SetInfo, *, option: str = "`dataset_path`") -> SetInfo:
    """Return a set that only its files name."""
    known = read_name(place)
    if known is not None:
        name = known.repo
    else:
        fixed = [part for part in Path(place).parts if not any(sign in part for sign in "*?[")]
        name = Path(*fixed).stem if fixed else "all"
    return replace(own, name=name, place=place, option=option)
