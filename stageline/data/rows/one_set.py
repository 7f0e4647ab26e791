"""One data set: rows of its files -> samples with id, source and group, and names of pictures."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from stageline.data.images.image_files import ImageFolders
from stageline.data.images.videos import read_frames, with_frames
from stageline.data.rows.bad_rows import current_bad_rows
from stageline.data.rows.converters import make_converter
from stageline.data.rows.json_lines import image_names
from stageline.data.rows.set_register import SetInfo
from stageline.data.rows.tables import SetFiles, find_files, open_tables
from stageline.errors import DataError

LOOKED_THROUGH = 100_000  # rows that are converted once in the beginning; of more, preflight's


class RowMaker:
    """Makes samples of the rows of one set; holds no rows.

    Args:
        image_path: folder that names of pictures are relative to; by default that of the files,
            and `images` in it.
        num_frames: most pictures that are taken of a film.
    """

    def __init__(
        self,
        info: SetInfo,
        files: SetFiles,
        *,
        image_path: str | None = None,
        num_frames: int = 8,
    ) -> None:
        self.info = info
        self._num_frames = num_frames
        self.files = files
        self._convert: Callable[[dict[str, Any], str], dict[str, Any]] = make_converter(
            info.formatting, columns=dict(info.columns), tags=dict(info.tags), ranking=info.ranking
        )
        roots = [Path(image_path)] if image_path else [files.folder, files.folder / "images"]
        self._folders = ImageFolders(roots)

    @property
    def name(self) -> str:
        """Of the set."""
        return self.info.name

    def convert(
        self, row: dict[str, Any], source: str, *, number: int
    ) -> tuple[list[str] | None, dict[str, Any]]:
        """Names of the row's pictures, or None, and its sample.

        Args:
            number: in the set; a row without an `id` is called by it.

        Raises:
            DataError: names the source.
        """
        sample = dict(self._convert(row, source))
        own = row.get("id")
        sample["id"] = str(own) if isinstance(own, str | int) else f"{self.name}-{number}"
        sample["source"] = source
        sample["group"] = self.name
        names = image_names(source, sample)
        films = [[film] if isinstance(film, str) else film for film in sample.get("videos") or ()]
        for name in [*(names or ()), *itertools.chain(*films)]:
            self._folders.check_name(name, source=source)
        return names, sample

    def make(
        self, row: dict[str, Any], source: str, *, number: int
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """The row's pictures, opened and not decoded, and its sample."""
        names, sample = self.convert(row, source, number=number)
        images = [self._folders.open(name, source=source) for name in names or ()]
        films = [
            read_frames(film, folders=self._folders, num_frames=self._num_frames, source=source)
            for film in sample.get("videos") or ()
        ]
        if films:
            return with_frames(sample, images, films)
        return images or None, sample

    def settings(self) -> str:
        """What decides how a row becomes a sample."""
        info = self.info
        facts: Mapping[str, Any] = {
            "name": info.name,
            "formatting": info.formatting,
            "columns": dict(info.columns),
            "tags": dict(info.tags),
            "ranking": info.ranking,
            "num_frames": self._num_frames,
        }
        return json.dumps(facts, sort_keys=True)


class OneSet:
    """The good rows of a set, in the order of its files.

    Every row of a set that is not large is converted once, so that a bad one is found before a
    model is loaded; it ends the run, unless bad rows may be left out.

    Args:
        media: where pictures are, and how many of a film are taken, as `RowMaker` has it.

    Attributes:
        rows: numbers of the good rows, over all files.
    """

    def __init__(self, info: SetInfo, *, cache: str | None = None, **media: Any) -> None:
        files = find_files(info.place, option=info.option)
        self.maker = RowMaker(info, files, **media)
        self.tables = open_tables(files, cache=cache, hub_split=info.split)
        self._starts = numpy.cumsum([0, *(len(table) for table in self.tables)])
        self.rows = numpy.arange(self._starts[-1], dtype=numpy.int64)
        if len(self.rows) <= LOOKED_THROUGH:
            is_good = [self._is_good(int(row)) for row in self.rows]
            self.rows = self.rows[numpy.array(is_good, dtype=bool)]
        if len(self.rows) == 0:
            raise DataError(
                f"the data set {info.name!r} has no good row. At least one was expected:\n"
                f"{current_bad_rows().listed(5)}"
            )

    @property
    def name(self) -> str:
        """Of the set."""
        return self.maker.name

    @property
    def num_read(self) -> int:
        """Rows of the files, bad ones too."""
        return int(self._starts[-1])

    def choose(self, places: numpy.ndarray) -> None:
        """Keeps the rows at these places, in their order; one may come twice."""
        self.rows = self.rows[places]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        number = int(self.rows[index])
        return self.maker.make(*self._read(number), number=number)

    def describe(self, index: int) -> str:
        """File and line of a row."""
        table, place = self._place(int(self.rows[index]))
        return self.tables[table].source(place)

    def facts(self) -> Sequence[str]:
        """What tells whether another set has the same rows, wherever its files lie."""
        digest = hashlib.sha256(self.rows.tobytes()).hexdigest()
        return [self.maker.settings(), *(table.digest for table in self.tables), digest]

    def _is_good(self, number: int) -> bool:
        row, source = self._read(number)
        try:
            self.maker.convert(row, source, number=number)
        except DataError as error:
            current_bad_rows().take(source, error)
            return False
        return True

    def _read(self, number: int) -> tuple[dict[str, Any], str]:
        table, place = self._place(number)
        return self.tables[table][place]

    def _place(self, number: int) -> tuple[int, int]:
        """(number of the table, row in it) of a row of the set."""
        table = int(numpy.searchsorted(self._starts, number, side="right")) - 1
        return table, number - int(self._starts[table])
