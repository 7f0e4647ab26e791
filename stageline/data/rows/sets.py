"""The `sets` dataset part: rows of one or more data sets as one dataset of a side, or a stream.

A register of sets has the shape of LLaMA-Factory's dataset_info.json, as JSON or YAML.

In a stream a row has a position, epoch after epoch, which follows from the files, the options and
the seed only. So any process that reads forward to a position finds the same row there: replicas
take other positions, and a resumed run reads forward to where it continues. All draws follow from a
seed, so every rank comes to the same rows without talking.
"""

import collections
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy
import yaml

from stageline.data.rows.bad_rows import current_bad_rows, leaving_out
from stageline.data.rows.converters import make_converter
from stageline.data.rows.json_lines import image_names
from stageline.data.rows.read_rows import (
    Row,
    SetFiles,
    TableRows,
    find_files,
    near_names,
    open_tables,
    part_of,
    stream_rows,
)
from stageline.data.rows.readers import RowsDataset, check_split
from stageline.errors import DataError, UserError
from stageline.hub import PREFIX, read_name
from stageline.seeds import derive_seed

FILE_NAME = "dataset_info.json"
LOOKED_THROUGH = 100_000  # rows that are converted once in the beginning; of more, preflight's
Mix = Literal["concat", "interleave_under", "interleave_over"]
Item = TypeVar("Item")
NO_END = 1 << 40  # the length of a stream
KEPT = 4096  # rows that were read last, at least: a step asks for its rows in any order
_HEAD = 1 << 16  # bytes at both ends of a file that its fingerprint is made of
_VERSION = 1  # counts changes of drawing or converting rows
_TYPE_OF_KEY: dict[str, type] = {
    **dict.fromkeys(("file_name", "formatting", "split"), str),
    **dict.fromkeys(("columns", "tags"), dict),
    **{"ranking": bool, "num_samples": int},
}


@dataclass(frozen=True)
class SetInfo:
    """One data set; how its rows are written is given as to `make_converter`."""

    name: str = ""  # the group of its rows in reports
    place: str = ""  # a file, folder or pattern, or `hub:owner/name[@revision]`
    formatting: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    ranking: bool = False
    num_samples: int | None = None  # exact number of rows that are drawn; None: all
    split: str = "train"  # split of a set of the hub
    option: str = "`dataset_path`"  # the option that gave the place, for errors


def chosen_sets(
    info: str | Path, names: Sequence[str], *, option: str = "`dataset.names`"
) -> list[SetInfo]:
    """Return the named sets of a register: of a file, or of a folder with a dataset_info.json.

    Raises:
        UserError: there is no such file or name, or an entry of it is not understood.
    """
    path = Path(info).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        read = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
        entries = {str(name): entry for name, entry in read.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"`dataset.info` {path} cannot be read ({error}). Give a file such as {FILE_NAME}, as "
            'JSON or YAML: {"name of a set": {"file_name": ...}}.'
        ) from error
    known = ", ".join([*entries][:20]) + f" and {len(entries) - 20} more" * (len(entries) > 20)
    if not names:
        raise UserError(f"{option} is missing. Give some of the names of {path}: {known}.")
    for name in names:
        if name not in entries:
            near = near_names(name, entries)
            raise UserError(f"{option} {name}: {path} has no such set.{near} It has {known}.")
    if len(set(names)) < len(names):
        raise UserError(f"{option} {','.join(names)} has a name twice. Give num_samples instead.")
    return [_read_entry(name, entries[name], path) for name in names]


def _read_entry(name: str, entry: Any, path: Path) -> SetInfo:
    place = f"{path}: the set {name!r}"
    if not isinstance(entry, dict):
        raise UserError(f'{place} is {entry!r}. Write an object: {{"file_name": ...}}.')
    options = {key: value for key, value in entry.items() if value is not None}
    for key, value in options.items():
        if key not in _TYPE_OF_KEY:
            raise UserError(
                f"{place} has the key {key!r}, which is not known.{near_names(key, _TYPE_OF_KEY)} "
                f"Known keys are {', '.join(_TYPE_OF_KEY)}; a set of the hub is written as "
                f'"file_name": "{PREFIX}owner/name".'
            )
        if type(value) is not _TYPE_OF_KEY[key] or (key == "num_samples" and options[key] < 1):
            kind = "number from 1" if key == "num_samples" else _TYPE_OF_KEY[key].__name__
            raise UserError(f"{place} has {key} {value!r}. Give a {kind}, or leave it out.")
    file = options.pop("file_name", None)
    if file is None:
        raise UserError(
            f"{place} has no file_name. Give a file, a folder or a pattern, relative to "
            f"{path.parent}, or {PREFIX}owner/name."
        )
    if read_name(file, folder=path.parent) is not None:
        file = PREFIX + file.removeprefix(PREFIX)
    else:
        file = str(path.parent / Path(file).expanduser())  # an absolute path stays what it is
    return SetInfo(name, file, option=f"{path}: {name}: file_name", **options)


class RowMaker(RowsDataset):
    """Makes samples of the rows of one set; holds no rows itself.

    Args:
        image_path: folder that names of images are relative to; by default that of the files,
            and `images` in it.
    """

    def __init__(
        self, info: SetInfo, *, image_path: str | None = None, num_frames: int = 8
    ) -> None:
        self.info = info
        self.files: SetFiles = find_files(info.place, option=info.option)
        self._convert = make_converter(
            info.formatting, columns=dict(info.columns), tags=dict(info.tags), ranking=info.ranking
        )
        folder = self.files.folder
        roots = [Path(image_path)] if image_path else [folder, folder / "images"]
        super().__init__([], image_roots=roots, num_frames=num_frames)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        own = row.data.get("id")
        name = str(own) if isinstance(own, str | int) else f"{self.info.name}-{row.number}"
        sample = {**self._convert(row.data, row.source), "id": name, "group": self.info.name}
        return image_names(row.source, sample), sample

    def settings(self) -> str:
        """Return what decides how a row becomes a sample."""
        names = ("name", "formatting", "columns", "tags", "ranking")
        facts = {name: getattr(self.info, name) for name in names}
        return json.dumps({**facts, "num_frames": self._num_frames}, sort_keys=True)


class OneSet(RowMaker):
    """The good rows of a set, in the order of its files; `media` as of `RowMaker`.

    Every row of a set that is not large is converted once, so that a bad one is found before a
    model is loaded.
    """

    rows: TableRows

    def __init__(self, info: SetInfo, *, cache: str | None = None, **media: Any) -> None:
        super().__init__(info, **media)
        self.rows = rows = open_tables(self.files, cache=cache, hub_split=info.split)
        if len(rows) <= LOOKED_THROUGH:
            rows.numbers = rows.numbers[[self.is_good(row) for row in rows]]
        if len(rows) == 0:
            raise DataError(
                f"the data set {info.name!r} has no good row. Correct them:\n"
                f"{current_bad_rows().listed(5)}"
            )

    def facts(self) -> Sequence[str]:
        """Return what tells whether another set has the same rows, wherever its files are."""
        digest = hashlib.sha256(self.rows.numbers.tobytes()).hexdigest()
        return [self.settings(), *(table.digest for table in self.rows.tables), digest]


StreamRow = tuple[RowMaker, Row]  # a row that was read and not yet converted


def check_mix(mix: Mix, num_sets: int, probabilities: Sequence[float] | None) -> None:
    """Refuse probabilities that do not belong to the sets."""
    if probabilities is None:
        return
    total, problem = sum(probabilities), ""
    if mix == "concat":
        problem = "`dataset.mix` concat takes all rows of each set. Choose another, or drop them"
    elif len(probabilities) != num_sets or num_sets == 1:
        problem = f"{num_sets} sets are mixed. Give one for each of several, or drop them"
    elif not all(0 <= value <= 1 for value in probabilities) or abs(total - 1) > 0.02:
        problem = f"they add up to {total:g}. Give values between 0 and 1 that add up to 1"
    elif mix == "interleave_over" and not all(probabilities):
        problem = "a set with chance 0 would never end. Leave that set out"
    if problem:
        given = ",".join(f"{value:g}" for value in probabilities)
        raise UserError(f"`dataset.probabilities` {given}: {problem}.")


def repeating(make_rows: Callable[[], Iterator[Item]], name: str) -> Iterator[tuple[Item, bool]]:
    """Yield the rows of a set, over and over, and whether each is the last one."""
    while True:
        rows = make_rows()
        row = next(rows, None)
        if row is None:
            raise DataError(f"the data set {name!r} has no good row. Check its files.")
        while row is not None:
            following = next(rows, None)
            yield row, following is None
            row = following


def interleave(
    sets: Sequence[Iterator[tuple[Item, bool]]],
    *,
    over: bool,
    probabilities: Sequence[float] | None,
    seed: int,
) -> Iterator[Item]:
    """Yield rows of several sets, as `datasets.interleave_datasets` takes them for the same seed.

    `datasets.interleave_datasets` cannot stop at a position and continue in a forked worker.

    Args:
        sets: iterators that `repeating` returns.
        over: continue until each set came to its end at least once; else until one has.
        probabilities: one for each set; None: they take turns, and a round is finished.
    """
    is_done = [False] * len(sets)
    stops = all if over else any
    generator = numpy.random.default_rng(seed)
    while True:  # a round, or a thousand draws at once as datasets makes them
        turns = list(range(len(sets)))
        if probabilities is not None:
            chances = numpy.array(probabilities) / sum(probabilities)
            turns = generator.choice(len(sets), size=1000, p=chances).tolist()
        for place, chosen in enumerate(turns):
            if (probabilities is not None or place == 0) and stops(is_done):
                return
            row, is_last = next(sets[chosen])
            yield row
            is_done[chosen] |= is_last


def mixed(
    lengths: Sequence[int], mix: Mix, probabilities: Sequence[float] | None, *, seed: int
) -> numpy.ndarray:
    """Return rows in the order of the mix, numbered over the sets."""
    starts = numpy.cumsum([0, *lengths]).tolist()
    if mix == "concat" or len(lengths) == 1:
        return numpy.arange(starts[-1], dtype=numpy.int64)
    numbers = [range(first, stop) for first, stop in itertools.pairwise(starts)]
    sets = [repeating(own.__iter__, str(place)) for place, own in enumerate(numbers)]
    over = mix == "interleave_over"
    order = interleave(sets, over=over, probabilities=probabilities, seed=seed)
    return numpy.fromiter(order, dtype=numpy.int64)


def exactly(num_rows: int, num_samples: int, *, seed: int, name: str) -> numpy.ndarray:
    """Return `num_samples` of the rows: each once in a drawn order, then more of them by lot."""
    generator = numpy.random.default_rng(derive_seed(seed, "num_samples", name))
    chosen = generator.permutation(num_rows)[:num_samples]
    more = generator.integers(num_rows, size=max(num_samples - num_rows, 0))
    return numpy.concatenate([chosen, more]).astype(numpy.int64)


def held_out(order: numpy.ndarray, val_size: int | float, *, seed: int) -> numpy.ndarray:
    """Return the `val_size` rows of `order` (below 1: a share), each once, kept for evaluation."""
    rows = numpy.unique(order)
    is_share = isinstance(val_size, float)
    if not (0 < val_size < 1 if is_share else val_size >= 1):
        raise UserError(
            f"`dataset.val_size` is {val_size}. Give a number of rows, or a share between 0 and 1."
        )
    count = max(1, round(val_size * len(rows))) if is_share else int(val_size)
    if count >= len(rows):
        raise UserError(
            f"`dataset.val_size` {val_size} leaves none of {len(rows)} different rows to train on. "
            "Choose a smaller one."
        )
    generator = numpy.random.default_rng(derive_seed(seed, "val_size"))
    return numpy.sort(generator.permutation(rows)[:count])


class _MadeRows:
    """A dataset of rows that makers convert when they are asked for."""

    def row(self, index: int) -> StreamRow:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[list[Any] | None, dict[str, Any]]:
        maker, row = self.row(index)
        return maker.make(row)

    def describe(self, index: int) -> str:
        """Return file and line of a row."""
        return self.row(index)[1].source


class StreamDataset(_MadeRows):
    """The rows of some sets by their position in an endless stream.

    Reading on is cheap; going back further than the rows that are kept starts from the beginning.
    """

    is_stream = True

    def __init__(
        self,
        makers: Sequence[RowMaker],
        *,
        mix: Mix,
        probabilities: Sequence[float] | None,
        buffer_size: int,
        val_size: int | float | None,
        seed: int,
    ) -> None:
        num_held = val_size or 0
        if buffer_size < 1:
            raise UserError(f"`dataset.buffer_size` is {buffer_size}. Give at least 1 row.")
        if not isinstance(num_held, int) or num_held < 0:
            raise UserError(
                f"`dataset.val_size` {num_held} does not work with a stream, whose first rows are "
                "held out. Give a number of rows."
            )
        for maker in makers:
            if maker.files.kind in ("json", "hub"):
                raise UserError(
                    f"{maker.info.option} {maker.info.place} does not go with `dataset.streaming`: "
                    "a JSON list is read as a whole, and so is a set of the hub. Write one object "
                    "a line (.jsonl), or leave streaming out."
                )
        self._facts = [_VERSION, mix, probabilities, buffer_size, num_held, seed]
        self._makers = list(makers)
        self._mix, self._probabilities = mix, probabilities
        self._buffer_size, self._seed = buffer_size, seed
        self._names = ", ".join(maker.info.name for maker in makers)
        self._bad_rows = current_bad_rows()
        # rows for evaluation
        held: dict[str, StreamRow] = {}  # where sets wrap around, a row comes twice
        rows = self._mixed() if num_held else iter(())
        with leaving_out(self._bad_rows):
            while len(held) < num_held and (item := next(rows, None)) is not None:
                held.setdefault(item[1].source, item)
        if len(held) < num_held:
            raise UserError(
                f"`dataset.val_size` {num_held}: the stream of {self._names} has {len(held)} rows. "
                "Choose a smaller number."
            )
        self.held = list(held.values())
        self._held_sources = set(held)
        self._start()

    def __len__(self) -> int:
        return NO_END

    def fingerprint(self) -> str:
        """Return what tells whether another stream has the same rows, by both ends of its files."""
        facts: list[Any] = [*self._facts]
        for maker in self._makers:
            facts.append(maker.settings())
            for path in maker.files.paths:
                size = path.stat().st_size
                with path.open("rb") as file:
                    digest = hashlib.sha256(file.read(_HEAD))
                    file.seek(max(size - _HEAD, 0))
                    digest.update(file.read(_HEAD))
                facts.append((path.name, size, digest.hexdigest()))
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def row(self, position: int) -> StreamRow:
        """Return the row at a position."""
        kept = self._kept
        # a forked worker shares the place in an open file with its siblings
        if self._process != os.getpid() or (kept and position < self._next - len(kept)):
            self._start()
        with leaving_out(self._bad_rows):
            while self._next <= position:
                self._kept.append(next(self._rows))
                self._next += 1
        return self._kept[position - self._next]

    def _start(self) -> None:
        self._process = os.getpid()
        self._next = 0  # position of the row that is read next
        self._rows = self._endless()
        size = max(KEPT, self._buffer_size)
        self._kept: collections.deque[StreamRow] = collections.deque(maxlen=size)

    def _endless(self) -> Iterator[StreamRow]:
        for epoch in itertools.count():
            generator = numpy.random.default_rng(derive_seed(self._seed, "stream", epoch))
            buffer: list[StreamRow] = []  # each leaves at random, when one more comes
            for item in self._mixed():
                if item[1].source in self._held_sources:
                    continue
                if len(buffer) < self._buffer_size:
                    buffer.append(item)
                    continue
                place = int(generator.integers(self._buffer_size))
                yield buffer[place]
                buffer[place] = item
            if self._buffer_size > 1:
                generator.shuffle(buffer)
            yield from buffer
            if not buffer:
                raise DataError(
                    f"the stream of {self._names} has no row to train on"
                    f"{' behind the held-out ones' if self.held else ''}. Check the files.\n"
                    f"{self._bad_rows.listed(5)}".rstrip()
                )

    def _mixed(self) -> Iterator[StreamRow]:
        """Yield one epoch in the order of the files, the held-out rows too."""
        if self._mix == "concat" or len(self._makers) == 1:
            return itertools.chain.from_iterable(map(self._read, self._makers))
        makers = [(functools.partial(self._read, maker), maker.info.name) for maker in self._makers]
        over, seed = self._mix == "interleave_over", derive_seed(self._seed, "mix") % 2**32
        sets = [repeating(*maker) for maker in makers]
        return interleave(sets, over=over, probabilities=self._probabilities, seed=seed)

    def _read(self, maker: RowMaker) -> Iterator[StreamRow]:
        """Yield the good rows of a set, in the order of its files."""
        number = 0
        for path in maker.files.paths:
            for row in stream_rows(path, maker.files.kind, take=self._bad_rows.take):
                # else a row would have a position before it is known to be bad
                if not self._bad_rows.limit or maker.is_good(row):
                    yield maker, replace(row, number=number)
                    number += 1


class FirstRows(_MadeRows):
    """The held-out rows of a stream, which are few and kept in memory."""

    def __init__(self, stream: StreamDataset) -> None:
        self._rows = stream.held
        self.fingerprint = stream.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> StreamRow:
        return self._rows[index]


class SetsDataset(_MadeRows):
    """Some rows of several sets, in a given order of rows that are numbered over the sets."""

    def __init__(self, sets: Sequence[OneSet], order: numpy.ndarray) -> None:
        self.sets = list(sets)
        self.order = order
        self._starts = numpy.cumsum([0, *(len(one) for one in sets)])

    def __len__(self) -> int:
        return len(self.order)

    def row(self, index: int) -> StreamRow:
        """Return the set of a row, and the row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        one, place = part_of(self._starts, int(self.order[index]))
        return self.sets[one], self.sets[one].rows[place]

    def fingerprint(self) -> str:
        """Return what tells whether another dataset has the same rows, wherever its files are."""
        facts = [fact for one in self.sets for fact in one.facts()]
        digest = hashlib.sha256(" ".join([f"sets {_VERSION}", *facts]).encode())
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
        num_samples: exact number of rows drawn of the set, some twice if it has fewer.
        max_samples: largest number of rows of each set, its first.
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
            raise UserError(f"`dataset`.{name} is {value}. Give at least 1, or drop it.")
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
            f"`dataset`.{given[0]} does not work with a register of sets. Write it into each "
            "entry there."
        )
    kinds = {"eval_names": eval_names, "eval_path": eval_path, "val_size": val_size}
    held = [f"`dataset.{name}`" for name, value in kinds.items() if value is not None]
    if len(held) > 1:
        raise UserError(f"{held[0]} does not work with {held[1]}. Leave one out.")
    has_eval = bool(eval_names or eval_path)
    if split == "test" and not has_eval and val_size is None:
        raise UserError(
            "there are no held-out rows. Give `dataset.val_size`, `dataset.eval_names` or "
            "`dataset.eval_path`, or `eval_samples` 0 to train without evaluations."
        )
    media: dict[str, Any] = {"image_path": image_path, "num_frames": num_frames}

    def load(infos: Sequence[SetInfo], mix: Any) -> SetsDataset:
        loaded = [OneSet(one, cache=cache, **media) for one in infos]
        for one in loaded:
            count = one.info.num_samples
            if count is not None:
                if split == "test" and has_eval:  # an evaluation sees each row once
                    count = min(count, len(one))
                drawn = exactly(len(one), count, seed=seed, name=one.info.name)
                one.rows.numbers = one.rows.numbers[drawn]
            one.rows.numbers = one.rows.numbers[:max_samples]
        mix_seed = derive_seed(seed, "mix") % 2**32
        order = mixed([len(one) for one in loaded], mix, probabilities, seed=mix_seed)
        return SetsDataset(loaded, order)

    # sets to evaluate on
    if split == "test" and eval_path:
        return load([_set_of(eval_path, own, option="`dataset.eval_path`")], "concat")
    if split == "test" and eval_names:
        infos = chosen_sets(
            info or dataset_path or FILE_NAME, eval_names, option="`dataset.eval_names`"
        )
        return load(infos, "concat")

    # sets to train on, of which some rows may be held out
    if info is None and names and dataset_path and (Path(dataset_path) / FILE_NAME).is_file():
        info = dataset_path
    if info is not None:
        infos = chosen_sets(info, names or [])
    elif names:
        raise UserError(
            f"`dataset.names` {','.join(names)} requires a register of sets. Give "
            f"`dataset.info` a file such as {FILE_NAME}, or a `dataset_path` that has one."
        )
    elif dataset_path:
        infos = [_set_of(dataset_path, own)]
    else:
        raise UserError("neither `dataset_path` nor `dataset.info` is given. Give one of them.")
    check_mix(mix, len(infos), probabilities)
    if not streaming:
        loaded = load(infos, mix)
        return loaded if val_size is None else loaded.side(split, val_size, seed=seed)
    if max_samples is not None or any(one.num_samples is not None for one in infos):
        raise UserError(
            "num_samples and max_samples do not work with `dataset.streaming`. Leave them out."
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
    fixed = [part for part in Path(place).parts if not any(sign in part for sign in "*?[")]
    name = known.repo if known is not None else Path(*fixed).stem if fixed else "all"
    return replace(own, name=name, place=place, option=option)
