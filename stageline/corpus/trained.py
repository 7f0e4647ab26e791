"""Which segments a run has seen: computed from what decides its batches, not kept by the run."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from stageline.corpus.mixture import Mixture
from stageline.corpus.pack import PackedRows
from stageline.errors import DataError

_MAGIC = b"\x93NUMPY"
_ROWS = 1 << 20  # computed at once


def rows_seen(mixture: Mixture, num_batches: int, *, first_batch: int = 0) -> numpy.ndarray:
    """The rows of some batches, counted over all epochs: sorted int64, each once.

    Args:
        num_batches: steps x batches a step (accumulation); `first_batch` of them are not looked at.
    """
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
    """The segments that the first batches of a run held: sorted int64, each once.

    Args:
        num_batches, first_batch: see `rows_seen`.
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
    """Writes numbers of segments: NumPy's format for names that end in .npy, else a line each."""
    numbers = numpy.asarray(indices, dtype=numpy.int64)
    with open(path, "wb") as file:
        if Path(path).suffix == ".npy":
            numpy.save(file, numbers, allow_pickle=False)
            return
        for start in range(0, len(numbers), _ROWS):
            file.write("".join(f"{n}\n" for n in numbers[start : start + _ROWS]).encode())


def load_indices(path: str | Path) -> numpy.ndarray:
    """Numbers of segments from a file of either kind, whatever its name: int64.

    Raises:
        DataError: there is no such file, or something else is in it.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return _checked(numpy.load(path, allow_pickle=False), path)
        return _read_lines(Path(path))
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing. A list of segments was expected: corpus.py find-trained writes "
            "one."
        ) from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise _not_a_list(path, str(error)) from None


def _read_lines(path: Path) -> numpy.ndarray:
    numbers = []
    with open(path, encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if not line.strip().isdecimal():
                raise _not_a_list(path, f"line {number} is {line.strip()[:40]!r}")
            numbers.append(int(line))
    return _checked(numpy.array(numbers, dtype=numpy.int64), path)


def _checked(numbers: numpy.ndarray, path: str | Path) -> numpy.ndarray:
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise _not_a_list(path, f"it has dtype {numbers.dtype} and {numbers.ndim} axes")
    return numbers.astype(numpy.int64)


def _not_a_list(path: str | Path, found: str) -> DataError:
    return DataError(
        f"{path} is no list of segments: {found}. Whole numbers were expected, one a line, or one "
        "array of them in NumPy's format: corpus.py find-trained writes both."
    )
