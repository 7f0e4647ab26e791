"""Which rows of several sets are taken, and in which order. Integers: knows neither files nor rows.

All draws follow from a seed, so every rank comes to the same rows without talking. Mixing gives
what `datasets.interleave_datasets` gives for the same seed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy

from stageline.errors import UserError
from stageline.seeds import derive_seed

Mix = Literal["concat", "interleave_under", "interleave_over"]
_DRAWN_AT_ONCE = 1000  # as the library does, so that draws are the same


def check_mix(mix: Mix, num_sets: int, probabilities: Sequence[float] | None) -> None:
    """Refuses probabilities that do not belong to the sets.

    Raises:
        UserError: says what they should be.
    """
    if probabilities is None:
        return
    given = f"--dataset.probabilities {','.join(f'{value:g}' for value in probabilities)}"
    if mix == "concat":
        raise UserError(
            f"{given} came with --dataset.mix concat, which takes all rows of each set. "
            "interleave_under or interleave_over was expected, because these draw sets: choose "
            "one, or leave the probabilities out."
        )
    if num_sets == 1:
        raise UserError(
            f"{given} came with one set. Two or more were expected, because they say from which "
            "set the next row comes: leave them out."
        )
    if len(probabilities) != num_sets:
        raise UserError(
            f"{given}: {len(probabilities)} came for {num_sets} sets. One for each set was "
            "expected, in the order of their names."
        )
    if not all(0 <= value <= 1 for value in probabilities) or abs(sum(probabilities) - 1) > 0.02:
        raise UserError(
            f"{given}: values between 0 and 1 that add up to 1 were expected, because each is the "
            f"chance of a set; they add up to {sum(probabilities):g}."
        )
    if mix == "interleave_over" and not all(probabilities):
        raise UserError(
            f"{given} with --dataset.mix interleave_over: a set with chance 0 would never come to "
            "its end, and drawing stops when all have: leave that set out."
        )


def interleave(
    advance: Sequence[Callable[[], bool]],
    *,
    over: bool,
    probabilities: Sequence[float] | None,
    seed: int,
) -> Iterator[int]:
    """Numbers of the sets that rows are taken from, one after the other, until mixing stops.

    Args:
        advance: of each set; is told of each row that is taken, and says whether it was the last.
        over: go on until each set came to its end at least once; else until one has.
    """
    num_sets = len(advance)
    is_done = [False] * num_sets
    stops = all if over else any
    # without probabilities sets take turns, and a round is finished
    turns = _turns(num_sets) if probabilities is None else _draws(probabilities, seed)
    for place, chosen in enumerate(turns):
        ends_here = probabilities is not None or place % num_sets == 0
        if ends_here and stops(is_done):
            return
        yield chosen
        is_done[chosen] |= advance[chosen]()


def mixed(
    lengths: Sequence[int], mix: Mix, probabilities: Sequence[float] | None, *, seed: int
) -> numpy.ndarray:
    """Rows in the order of the mix; those of the second set are numbered after the first's."""
    if mix == "concat" or len(lengths) == 1:
        return numpy.arange(sum(lengths), dtype=numpy.int64)
    starts = numpy.cumsum([0, *lengths])
    if probabilities is None:
        count = (min if mix == "interleave_under" else max)(lengths)
        rounds = numpy.arange(count, dtype=numpy.int64)
        return numpy.stack(
            [start + rounds % size for start, size in zip(starts, lengths, strict=False)], axis=1
        ).reshape(-1)
    counters = [_Counter(size) for size in lengths]
    order = [
        int(starts[chosen]) + counters[chosen].place
        for chosen in interleave(
            [counter.advance for counter in counters],
            over=mix == "interleave_over",
            probabilities=probabilities,
            seed=seed,
        )
    ]
    return numpy.array(order, dtype=numpy.int64)


def exactly(num_rows: int, num_samples: int, *, seed: int, name: str) -> numpy.ndarray:
    """`num_samples` of the rows: each once in a drawn order, then more of them by lot."""
    generator = numpy.random.default_rng(derive_seed(seed, "num_samples", name))
    chosen = generator.permutation(num_rows)[:num_samples]
    more = generator.integers(num_rows, size=max(num_samples - num_rows, 0))
    return numpy.concatenate([chosen, more]).astype(numpy.int64)


def held_out(order: numpy.ndarray, val_size: int | float, *, seed: int) -> numpy.ndarray:
    """The rows of `order`, each once, that are kept for evaluation.

    Args:
        val_size: their number, or below 1 their share, at least one.

    Raises:
        UserError: nothing would be left to train, or the size is neither.
    """
    rows = numpy.unique(order)
    is_share = isinstance(val_size, float)
    if (is_share and not 0 < val_size < 1) or (not is_share and val_size < 1):
        raise UserError(
            f"--dataset.val_size {val_size}: a number of rows (1, 2, ...) or a share between 0 and "
            "1 was expected, because so many rows are held out: correct it, or leave it out."
        )
    count = max(1, round(val_size * len(rows))) if is_share else val_size
    if count >= len(rows):
        raise UserError(
            f"--dataset.val_size {val_size} holds out {count} of {len(rows)} different rows. At "
            "least one was expected to be left to train: choose a smaller one."
        )
    generator = numpy.random.default_rng(derive_seed(seed, "val_size"))
    return numpy.sort(generator.permutation(rows)[:count])


class _Counter:
    """The next row of a set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = 0

    def advance(self) -> bool:
        self.place += 1
        is_last = self.place == self.size
        self.place %= self.size
        return is_last


def _turns(num_sets: int) -> Iterator[int]:
    while True:
        yield from range(num_sets)


def _draws(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    generator = numpy.random.default_rng(seed)
    chances = numpy.array(probabilities) / sum(probabilities)
    while True:
        drawn = generator.choice(len(chances), size=_DRAWN_AT_ONCE, p=chances)
        yield from (int(number) for number in drawn)
