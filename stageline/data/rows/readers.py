"""Shared code of dataset parts: finding files, splitting rows, datasets with lazy images."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Subset

from stageline.data.images.image_files import ImageFolders
from stageline.data.images.videos import with_videos
from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.read_rows import Row
from stageline.errors import DataError, UserError


def find_file(folder: Path, names: Iterable[str]) -> Path:
    """Return the first of several places below a folder where a file is."""
    names = list(names)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is not None:
        return found
    there = sorted(item.name for item in folder.iterdir())[:8] if folder.is_dir() else []
    raise UserError(
        f"none of {', '.join(names)} is in {folder}, which has {', '.join(there) or 'nothing'}. "
        "Point `dataset_path` to the dataset's folder."
    )


def dataset_folder(dataset_path: str | None, *, name: str) -> Path:
    """Return the folder or file that `dataset_path` names."""
    if not dataset_path or not Path(dataset_path).exists():
        raise UserError(
            f"`dataset_path` {dataset_path or '(not given)'}: there is no such file or folder. "
            f"Give that of the dataset {name}."
        )
    return Path(dataset_path)


def split_rows(
    rows: Sequence[Row],
    *,
    split: str,
    test_size: int | float,
    key: Callable[[Row], str] | None = None,
) -> list[Row]:
    """Return the rows of "train" or "test", by a fixed draw that does not depend on their order.

    Args:
        test_size: held-out rows as a number, or below 1 (or 1.0: all) as a share.
        key: rows of one key, such as an image, go to the same side.
    """
    check_split(split)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        try:
            groups.setdefault(key(row) if key else str(row.number), []).append(row)
        except DataError as error:
            current_bad_rows().take(row.source, error)
    rows = [row for row in rows if row.source not in current_bad_rows().reasons]
    wanted = test_size if isinstance(test_size, int) else round(test_size * len(rows))
    test: set[int] = set()
    for name in sorted(
        groups, key=lambda name: hashlib.sha256(f"split {name}".encode()).hexdigest()
    ):
        if len(test) < wanted:
            test.update(row.number for row in groups[name])
    chosen = [row for row in rows if (row.number in test) == (split == "test")]
    if not chosen:
        raise UserError(
            f"test_size {test_size} leaves no row for the split {split!r} of {len(rows)} rows. "
            "Choose another test_size."
        )
    return chosen


def check_split(split: str) -> None:
    """Refuse any split but train and test."""
    if split not in ("train", "test"):
        raise UserError(f"the split {split!r} is not known: it must be 'train' or 'test'.")


class RowsDataset:
    """A dataset over rows of files; a subclass has the meaning of a row.

    Every row is converted once in the beginning, so that a bad one is found before a model is
    loaded. Images are only opened when a row is asked for, and not decoded.
    """

    rows: Sequence[Row]

    def __init__(
        self, rows: Sequence[Row], *, image_roots: Sequence[Path], num_frames: int = 8
    ) -> None:
        self.image_roots = list(image_roots)
        self._folders = ImageFolders(self.image_roots)
        self._num_frames = num_frames
        self.rows = [row for row in rows if self.is_good(row)]
        if rows and not self.rows:
            raise DataError(
                f"all {len(rows)} rows are bad. Correct them:\n{current_bad_rows().listed(5)}"
            )

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        """Return the names of the row's images, or None, and its sample with at least an `id`."""
        raise NotImplementedError

    def is_good(self, row: Row) -> bool:
        """Tell whether a row can be converted; else it goes to `current_bad_rows`."""
        try:
            names, sample = self.convert(row)
            videos = sample.get("videos") or ()
            frames = ([one] if isinstance(one, str) else one for one in videos)
            for name in itertools.chain(names or (), *frames):
                self._folders.check_name(name, source=f"{row.source}: sample {sample.get('id')}")
        except DataError as error:
            current_bad_rows().take(row.source, error)
            return False
        return True

    def make(self, row: Row) -> tuple[list[Image.Image] | None, dict[str, Any]]:
        """Return the row's images, opened and not decoded, and its sample."""
        names, sample = self.convert(row)
        sample["source"] = row.source
        place = f"{row.source}: sample {sample.get('id')}"
        opened = [self._folders.open(name, source=place) for name in names or ()]
        images = None if names is None else opened
        more: dict[str, Any] = {"folders": self._folders, "num_frames": self._num_frames}
        return with_videos(sample, images, source=place, **more)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Image.Image] | None, dict[str, Any]]:
        return self.make(self.rows[index])

    def describe(self, index: int) -> str:
        """Return file and line of a row."""
        return self.rows[index].source

    def fingerprint(self) -> str:
        """Return what tells whether another dataset has the same rows, wherever its files are."""
        digest, last = hashlib.sha256(type(self).__name__.encode()), ""
        for row in self.rows:
            if row.digest not in ("", last):
                digest.update(f"file {row.digest} ".encode())
            last = row.digest
            digest.update(f"{row.number} ".encode())
        return digest.hexdigest()


def data_fingerprint(dataset: Any) -> str | None:
    """Return the fingerprint of a dataset; None where its part offers none.

    It may offer `fingerprint() -> str`: equal for equal rows in the same order, in whatever folder,
    and another one when a row or a file changes. Keep it cheap.
    """
    if isinstance(dataset, Subset):
        inner, more = data_fingerprint(dataset.dataset), dataset.indices
    else:
        offered = getattr(dataset, "fingerprint", None)
        inner, more = None if offered is None else offered(), [len(dataset)]
    if inner is None:
        return None
    return hashlib.sha256(" ".join([inner, *map(str, more)]).encode()).hexdigest()
