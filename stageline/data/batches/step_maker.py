"""Makes all micro-batches of one optimizer step: reads rows, arranges them by length, collates.

Runs in a worker process of the loader, and draws the same random numbers in any. A micro-batch
costs its rows times the longest of them, for padding is computed too. Rows are arranged within a
step, so the gradient is that of any other order.
"""

import copy
import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from stageline.contracts import IGNORE, broken, call, shown
from stageline.data.batches.batch import MicroBatch
from stageline.data.batches.collate_part import as_collate_part
from stageline.data.batches.sampler import expand
from stageline.errors import DataError, UserError
from stageline.seeds import derive_seed, host_state_kept, seed_host

Item = tuple[Any, Any]  # images, sample
Shares = Sequence[Sequence[int | None]]  # the rows of each replica; None only fills up
_PR_SET_PDEATHSIG = 1


def make_dataset(part: Callable[..., Any], *, dataset_path: str | None, **given: Any) -> Any:
    """Call a dataset part."""
    dataset = call("dataset", part, dataset_path=dataset_path, **given)
    for name in ("__len__", "__getitem__"):
        if not hasattr(dataset, name):
            raise broken(
                "dataset",
                part if dataset is None else dataset,
                f"returned {shown(None)}" if dataset is None else f"has no {name}",
                why="Each rank takes its rows by number",
                cure="give it __len__(self) and __getitem__(self, index)",
            )
    return dataset


def read_row(dataset: Any, row: int) -> Item:
    """Return the (images, sample) of a row."""
    item = dataset[row]
    came = _problem_of(item)
    if came is None:
        return item[0], item[1]
    while isinstance(dataset, Subset):
        dataset, row = dataset.dataset, dataset.indices[row]
    raise broken(
        "dataset",
        dataset,
        f"gave for row {row} {came}",
        why="A row is a pair of images and sample",
        cure="return (None, sample), the sample a dict, or ([Image.open(path)], sample)",
        kind=DataError,
    )


def _problem_of(item: object) -> str | None:
    """Return what is wrong with a row."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return shown(item)
    images, sample = item
    if not isinstance(sample, Mapping):
        return f"{shown(sample)} as its sample"
    if images is None:
        return None
    is_list = hasattr(images, "__len__") and not hasattr(images, "convert")
    if not is_list or isinstance(images, str | bytes | Mapping | torch.Tensor):
        return f"{shown(images)} as its images"
    for place, image in enumerate(images):
        if not (hasattr(image, "convert") and hasattr(image, "size")):
            return f"{shown(image)} as image {place} of its images"
    return None


def group_by_length(lengths: Sequence[int], num_groups: int) -> list[list[int]]:
    """Return indices in groups of near-equal length and near-equal cost; none is empty.

    Rows are cut in order of length, long ones into small groups and short ones into large groups,
    so that the costliest group is as cheap as any such cut allows.
    """
    assert 1 <= num_groups <= len(lengths)
    order = _longest_first(lengths)

    def cut(most: int) -> list[list[int]]:
        """Return the fewest groups, each of at most that cost."""
        groups: list[list[int]] = []
        for index in order:
            if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= most:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    low, high = lengths[order[0]], lengths[order[0]] * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= num_groups:
            high = middle
        else:
            low = middle + 1
    groups = cut(low)
    while len(groups) < num_groups:
        costs = [len(group) > 1 and padded_cost([lengths[i] for i in group]) for group in groups]
        place = costs.index(max(costs))
        group = groups[place]
        groups[place : place + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups


def padded_cost(lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch with its padding."""
    return len(lengths) * max(lengths, default=0)


def order_by_cost(costs: Sequence[int]) -> list[int]:
    """Return indices so that costs rise to the middle and fall again.

    The first micro-batch fills the pipeline and the last drains it, so both are cheap; in between
    stages wait by the difference of neighbours (simulated in tests/unit/test_arrange.py).
    """
    rising = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    return rising[::2] + rising[1::2][::-1]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices in rows of at most `capacity` tokens, by best fit."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sample of {length} tokens does not fit a row of `max_token_num` {capacity}. "
                "Raise `max_token_num`, or let the collate_fn part limit the length."
            )
        fits = [place for place in range(len(rows)) if room[place] >= length]
        place = min(fits, key=lambda place: (room[place], place), default=len(rows))
        if not fits:
            rows.append([])
            room.append(capacity)
        rows[place].append(index)
        room[place] -= length
    return rows


def pack_into(lengths: Sequence[int], capacity: int, num_rows: int) -> list[list[int]]:
    """Pack lengths into exactly `num_rows` rows, which must be enough and are filled evenly."""
    packed = pack(lengths, capacity)
    assert len(packed) <= num_rows
    if len(packed) == num_rows:
        return packed
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [0] * num_rows
    for index in _longest_first(lengths):
        place = min(range(num_rows), key=lambda place: (filled[place], place))
        if filled[place] + lengths[index] > capacity:  # rare: even rows left no gap large enough
            return packed + [[] for _ in range(num_rows - len(packed))]
        rows[place].append(index)
        filled[place] += lengths[index]
    return rows


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def end_with_rank(worker: int) -> None:
    """Let the kernel kill this worker when its rank is gone (Linux); called in the worker.

    It was forked and holds the rank's connections open: until it ends, other ranks do not learn of
    a killed one. By itself it looks for its rank every five seconds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # the parent ended before the request
        os._exit(1)


def portable(error: Exception) -> Exception:
    """Return the error, or one with its words where it would leave a worker otherwise."""
    if get_worker_info() is None:
        return error
    try:
        # the queue drops what it cannot send, and the rank would wait for ever
        ForkingPickler.dumps(error)
        if str(copy.copy(error)) == str(error):  # made again, as on the other side
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


@dataclass(eq=False)
class StepMaker(Dataset):
    """One sample a row, padded to the longest of its micro-batch.

    A collate part without an `encode` gets the rows in the given order.
    """

    dataset: Any
    _: KW_ONLY
    collate: Callable[[Sequence[Any]], MicroBatch]
    micro_batch_size: int  # rows of a micro-batch; of sorted ones the mean
    dp_rank: int = 0
    is_sorted: bool = True
    seed: int = 0  # seeds random draws of rows and the collate part
    group_size: int = 1
    facts: Callable[[MicroBatch], MicroBatch] | None = (
        None  # values that a model reads off on the host
    )

    def __post_init__(self) -> None:
        self.part = as_collate_part(self.collate)
        self.host_facts = self.facts or (lambda batch: {})
        self.is_fixed = getattr(self.dataset, "is_fixed", False)  # its rows draw nothing

    def __getitem__(self, request: tuple[int, Shares]) -> list[MicroBatch] | Exception:
        try:
            with host_state_kept():
                return self.make(*request)
        except Exception as error:
            return portable(error)  # raised in a worker, its traceback would bury the message

    def make(self, step: int, shares: Shares) -> list[MicroBatch]:
        """Return the micro-batches of this replica."""
        rows = shares[self.dp_rank]
        items = self._read(step, shares)
        groups = _consecutive(range(len(items)), self.micro_batch_size)
        if self.is_sorted and self.part.encode is not None:
            # a group of rows moves as one, as long as its longest row
            lengths = [item.length for item in items]
            longest = [max(unit) for unit in _consecutive(lengths, self.group_size)]
            grouped = group_by_length(longest, len(items) // self.micro_batch_size)
            groups = [expand(units, self.group_size) for units in _in_order(grouped, longest)]
        made = []
        for place, group in enumerate(groups):
            self._seed_micro_batch(step, place, of=len(groups))
            made.append(
                self._collate([items[index] for index in group], [rows[index] for index in group])
            )
        return made

    def _read(self, step: int, shares: Shares, replica: int | None = None) -> list[Any]:
        """Return the rows of a share, encoded where the collate part encodes; default: its own.

        Random draws of a row (an augmentation) follow from seed, step and its place over all
        replicas. The dataset's first group, a whole one, fills up.
        """
        replica = self.dp_rank if replica is None else replica
        first = sum(map(len, shares[:replica]))
        items = []
        for index, row in enumerate(shares[replica]):
            if not self.is_fixed:
                seed_host(derive_seed(self.seed, "row", step, first + index))
            item = self.dataset[index % self.group_size if row is None else row]
            items.append(item if self.part.encode is None else self.part.encode(*item))
        return items

    def _seed_micro_batch(self, step: int, place: int, *, of: int) -> None:
        """Seed the draws of the collate part; all replicas make `of` micro-batches."""
        seed_host(derive_seed(self.seed, "micro-batch", step, self.dp_rank * of + place))

    def _collate(self, items: list[Any], rows: list[int | None]) -> MicroBatch:
        """Collate a micro-batch; rows that only fill up get labels of -100.

        `loss_rows` has the row of the dataset of each (-1: none), and `loss_packed_rows` that of
        each sample where rows hold several; stages get neither. A collate part may make several
        rows of each sample, next to each other.
        """
        batch = self.part.collate(items)
        times, rest = divmod(len(batch["labels"]), len(rows))
        assert times and not rest, f"{len(rows)} samples became {len(batch['labels'])} rows"
        rows = [row for row in rows for _ in range(times)]
        batch["labels"][torch.tensor([row is None for row in rows])] = IGNORE
        batch = {**batch, **self.host_facts(batch)}
        numbers = torch.tensor([-1 if row is None else row for row in rows])
        if "sample_ids" not in batch:
            return {**batch, "loss_rows": numbers}
        counts = batch["sample_ids"].amax(dim=1) + 1  # samples of each row, which was packed so
        return {**batch, "loss_packed_rows": numbers.repeat_interleave(counts)}


class PromptMaker(StepMaker):
    """The rows of a step as they are encoded, with their numbers: prompts, before any answer."""

    def make(self, step: int, shares: Shares) -> list[Any]:
        """Return (row of the dataset or None, place in the step, encoded sample) of each."""
        places = itertools.count(sum(map(len, shares[: self.dp_rank])))
        return list(zip(shares[self.dp_rank], places, self._read(step, shares), strict=False))


@dataclass(eq=False)
class PackedStepMaker(StepMaker):
    """Several samples a row. All replicas make the same number of micro-batches."""

    _: KW_ONLY
    capacity: int  # tokens of a row
    legal_counts: Callable[[int], int]  # rounds micro-batches up to what the schedule can run
    # (step, number) -> the largest of any replica; None: the rows of all are encoded here
    agree: Callable[[int, int], int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part.encode is None or self.part.pack is None:
            raise UserError(
                "`packing` needs a `collate_fn` with `encode` and `pack`. Use `collate_fn` sft, or "
                "add the two functions (docs/add_a_part.md)."
            )

    def make(self, step: int, shares: Shares) -> list[MicroBatch]:
        assert not any(None in share for share in shares), "evaluation is not packed"
        assert self.part.pack is not None
        rows, items = shares[self.dp_rank], self._read(step, shares)
        own = [item.length for item in items]
        most_rows = len(pack(own, self.capacity))
        if self.agree is not None:
            most_rows = self.agree(step, most_rows)
        else:
            for replica in set(range(len(shares))) - {self.dp_rank}:
                lengths = [item.length for item in self._read(step, shares, replica)]
                most_rows = max(most_rows, len(pack(lengths, self.capacity)))
        count = self.legal_counts(-(-most_rows // self.micro_batch_size))
        bins = pack_into(own, self.capacity, count * self.micro_batch_size)
        fill = [sum(own[index] for index in members) for members in bins]
        by_fill = sorted(range(len(bins)), key=lambda place: -fill[place])
        groups = _consecutive(by_fill, self.micro_batch_size)
        if self.is_sorted:
            groups = _in_order(groups, fill)
        made = []
        for place, group in enumerate(groups):
            self._seed_micro_batch(step, place, of=count)
            batch = self.part.pack([[items[index] for index in bins[row]] for row in group])
            members = [rows[index] for row in group for index in bins[row]]
            numbers = torch.tensor(members, dtype=torch.int64)
            made.append({**batch, **self.host_facts(batch), "loss_packed_rows": numbers})
        return made


def _consecutive(indices: Sequence[int], size: int) -> list[list[int]]:
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _in_order(groups: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    costs = [padded_cost([lengths[index] for index in group]) for group in groups]
    return [groups[place] for place in order_by_cost(costs)]
