"""The `sets` dataset part: what the options say -> a dataset of one side, or a stream."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy

from stageline.data.readers import check_split
from stageline.data.sets.choices import Choices, eval_infos, train_infos
from stageline.data.sets.dataset import SetsDataset
from stageline.data.sets.info import SetInfo
from stageline.data.sets.mixing import check_mix, exactly, held_out, mixed
from stageline.data.sets.one_set import OneSet
from stageline.data.sets.stream import FirstRows, StreamDataset
from stageline.errors import UserError
from stageline.seeds import derive_seed


class Sets:
    """Your own data sets: JSON, JSON lines, CSV, text, Parquet or Arrow; see docs/data.md.

    --dataset-path is a file, a folder, a pattern, or hub:owner/name.

    Args:
        info: register of sets, as dataset_info.json; --dataset.names chooses from it.
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
            "--dataset.val_size came with sets to evaluate on (--dataset.eval_names or eval_path). "
            "One of them was expected, because both say what is held out: leave one out."
        )
    if split == "test" and held is None and val_size is None:
        raise UserError(
            "there are no held-out rows. --dataset.val_size, --dataset.eval_names or "
            "--dataset.eval_path was expected, because the data set has no split of its own: give "
            "one, or --eval-samples 0 to train without evaluations."
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
