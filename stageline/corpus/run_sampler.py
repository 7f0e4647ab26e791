"""Draw the rows of a training run, also after a change of replicas or accumulation.

A run keeps the batches it began with: their size is in its checkpoints. An optimizer step takes as
many of them as it has rows for, and its rows are dealt out to all replicas in turn. So a run on one
device that accumulates 8 batches continues, row for row, on 8 devices that accumulate none.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.lib.format import MAGIC_PREFIX

from stageline.corpus.mixture import Mixture
from stageline.corpus.pack import PackedRows
from stageline.errors import DataError, UserError


@dataclass(frozen=True)
class RunSampler:
    """The rows of each optimizer step, for the micro-batch loader."""

    mixture: Mixture
    num_batches: int  # batches of a step
    dp_rank: int = 0
    dp_degree: int = 1
    origin: int = 0  # number of the batch at which step 0 would begin
    names: Sequence[str] = ()  # names of the types, for the report

    def __len__(self) -> int:
        """Return the whole steps of one epoch; batches that are left over begin the next one."""
        return len(self.mixture) // self.num_batches

    def shares(self, start_step: int = 0) -> Iterator[list[list[int]]]:
        """Yield the rows of every replica, from a step on, epoch after epoch, without end."""
        for step in itertools.count(start_step):
            first = self.origin + step * self.num_batches
            batches = [
                self.mixture.batch(*divmod(number, len(self.mixture)))
                for number in range(first, first + self.num_batches)
            ]
            rows = numpy.concatenate(batches)
            yield [rows[replica :: self.dp_degree].tolist() for replica in range(self.dp_degree)]

    def steps(self, start_step: int = 0) -> Iterator[list[int]]:
        """Return the rows of this replica in each step, from `shares`."""
        return (shares[self.dp_rank] for shares in self.shares(start_step))

    def state_after(self, step: int) -> dict[str, int]:
        """Return what a checkpoint stores: the next epoch and batch, and the rows of a batch."""
        epoch, batch = divmod(self.origin + step * self.num_batches, len(self.mixture))
        return {"epoch": epoch, "batch": batch, "batch_rows": self.mixture.batch_rows}

    def report(self) -> str:
        """Return a line for each type about its rows in an epoch."""
        mixture = self.mixture
        size, mode = mixture.batch_rows, mixture.drop_mode
        lines = [f"an epoch is {len(mixture)} batches of {size} rows ({mode})"]
        for kind, drawn in enumerate(mixture.drawn()):
            name = self.names[kind] if kind < len(self.names) else str(kind)
            size, share = mixture.sizes[kind], float(mixture.shares.share(kind))
            more = f", {drawn - size} of them again" if drawn > size else ""
            more += f", {size - drawn} left out" if drawn < size else ""
            lines.append(f"  type {name}: {drawn} of {size} rows, {share:.4g} in a batch{more}")
        return "\n".join(lines) + "\n"


def run_sampler(
    sizes: Sequence[int],
    *,
    batch_size: int,
    step_samples: int,
    dp_rank: int = 0,
    dp_degree: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    counts: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    drop_mode: str | int | None = None,
    start_step: int = 0,
    position: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> RunSampler:
    """Return the sampler of a run.

    Args:
        sizes: rows of each type.
        batch_size, step_samples: rows of a replica in one batch, and in one step.
        counts, weights, drop_mode: arguments of the mixture. Counts may be those of the run that
            this one continues: they decide the size of a batch.
        position: what `state_after` returned for `start_step` in the run that this one continues.

    Raises:
        UserError: a step is not a whole number of batches, or the mixture does not fit the types.
    """
    step_rows = step_samples * dp_degree
    saved = position["batch_rows"] if position else None
    batch = batch_size * dp_degree
    if saved is not None and step_rows % saved == 0:
        batch = saved
    if counts is not None and sum(counts) > 0:
        if step_rows % sum(counts):
            raise UserError(
                f"`global_batch_distributed` {','.join(map(str, counts))} adds up to {sum(counts)} "
                f"rows; a global batch has {batch_size * dp_degree} (`batch_size` x replicas), a "
                f"step {step_rows}. Change the counts or `batch_size`."
            )
        batch = sum(counts)
    mixture = Mixture(
        sizes,
        counts=counts,
        weights=weights,
        batch=batch,
        drop_mode=0 if drop_mode is None else drop_mode,
        seed=seed,
        shuffle=shuffle,
    )
    num_batches, origin = step_rows // batch, 0
    if position is not None:  # the size of a batch may differ: keep the rows that are done
        origin = position["epoch"] * len(mixture) + position["batch"] * saved // batch
        origin -= start_step * num_batches
    return RunSampler(mixture, num_batches, dp_rank, dp_degree, origin, names)


_ROWS = 1 << 20  # computed at once


def rows_seen(mixture: Mixture, num_batches: int, *, first_batch: int = 0) -> numpy.ndarray:
    """Return the rows of batches first_batch to num_batches: sorted int64, each once."""
    is_seen = numpy.zeros(mixture.starts[-1], dtype=bool)
    at_once = max(1, _ROWS // mixture.batch_rows)
    number = first_batch
    while number < num_batches:
        epoch, index = divmod(number, len(mixture))
        if index == 0 and is_seen.all():
            break
        until = min(index + at_once, index + num_batches - number, len(mixture))
        is_seen[mixture.rows(epoch, index, until)] = True
        number += until - index
    return numpy.flatnonzero(is_seen)


def find_trained(
    mixture: Mixture,
    num_batches: int,
    *,
    first_batch: int = 0,
    ranges: Sequence[tuple[int, int]] | None = None,
    packed: PackedRows | None = None,
) -> numpy.ndarray:
    """Return the segments that the first batches of a run held: sorted int64, each once.

    Args:
        ranges: of each type, the first of its rows in the corpus and the one behind its last,
            where the mixture draws from a part of them because others are held out.
        packed: rows of the mixture are packed ones.
    """
    rows = rows_seen(mixture, num_batches, first_batch=first_batch)
    if ranges is not None:
        assert [stop - first for first, stop in ranges] == mixture.sizes
        shifts = numpy.array([range_[0] for range_ in ranges]) - mixture.starts[:-1]
        rows = rows + shifts[numpy.searchsorted(mixture.starts, rows, side="right") - 1]
    return rows if packed is None else numpy.sort(packed.members(rows))


def save_indices(path: str | Path, indices: numpy.ndarray) -> None:
    """Write numbers of segments: NumPy's format for names that end in .npy, else a line each."""
    if Path(path).suffix == ".npy":
        numpy.save(path, indices, allow_pickle=False)
    else:
        numpy.savetxt(path, indices, fmt="%d")


def load_indices(path: str | Path) -> numpy.ndarray:
    """Read int64 numbers of segments from a file of either kind, or raise DataError."""
    try:
        data = Path(path).read_bytes()
        if data.startswith(MAGIC_PREFIX):
            numbers = numpy.load(path, allow_pickle=False)
        else:
            numbers = numpy.array(data.decode().split(), dtype=numpy.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ValueError(f"it has dtype {numbers.dtype} and {numbers.ndim} axes")
    except FileNotFoundError:
        raise DataError(f"{path} is missing. Write it first (corpus.py find-trained).") from None
    except ValueError as error:
        raise DataError(
            f"{path} is not a list of segments: {error}. Give a file of corpus.py find-trained."
        ) from None
    return numbers.astype(numpy.int64)
