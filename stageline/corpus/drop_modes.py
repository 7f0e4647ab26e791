"""When an epoch of a mixture ends, where its types do not end together. Pure integers.

Each type gives its rows in an order of its own; where they are used up, it begins another order of
the same rows (never draws with replacement: no row comes a third time before each came twice). So
the number of batches alone decides what is repeated and what is left out:

- `first_ends_drop` (0): the type whose rows suffice for the fewest batches ends the epoch, before
  it would have to repeat one. No row of any type comes twice. Its rest that is smaller than its
  share is left out, and so are all rows of the others that were not yet due.
- `first_ends_fill` (1): as before, but the type that ends first is seen whole: if a rest is left,
  one more batch takes it, filled up to the share from another order. At most one share of it, less
  one, comes twice. The others are left out as before; one that would have ended with the same batch
  may be filled up in it too.
- `last_ends_drop` (2): the type that suffices for the most batches ends the epoch; its rest that is
  smaller than its share is left out. All others are seen whole and repeated until then, as many
  times as it takes.
- `last_ends_fill` (3): as before, but the rest comes too, filled up from another order. Every row
  of every type comes at least once.

What is left out is other rows in each epoch, because each epoch has orders of its own.

Types of 100, 50 and 10 rows, 5, 2 and 1 in a batch, suffice for 20, 25 and 10 batches:

    mode               batches  rows drawn     different rows  most often a row
    first_ends_drop    10       50, 20, 10     50, 20, 10      1, 1, 1
    first_ends_fill    10       50, 20, 10     50, 20, 10      1, 1, 1
    last_ends_drop     25       125, 50, 25    100, 50, 10     2, 1, 3
    last_ends_fill     25       125, 50, 25    100, 50, 10     2, 1, 3

Drop and fill differ where the type that decides leaves a rest: of 13 rows, 3 in a batch,
`first_ends_drop` ends after 4 batches with 1 row left out, `first_ends_fill` after 5 with 2 rows
twice.
"""

import bisect
from collections.abc import Sequence
from typing import Literal, get_args

from stageline.corpus.apportion import Apportionment
from stageline.errors import UserError

DropMode = Literal["first_ends_drop", "first_ends_fill", "last_ends_drop", "last_ends_fill"]
DROP_MODES: tuple[DropMode, ...] = get_args(DropMode)


def as_drop_mode(value: str | int) -> DropMode:
    """The mode of this name or number.

    Raises:
        UserError: there is none.
    """
    if str(value) in DROP_MODES:
        return str(value)  # type: ignore[return-value]
    if str(value) in ("0", "1", "2", "3"):
        return DROP_MODES[int(value)]
    raise UserError(
        f"drop mode {value!r} was given. One of {', '.join(DROP_MODES)} or its number 0 to 3 was "
        "expected: it says which type of segments ends an epoch, and whether its rest is dropped "
        "or filled up with repeated ones."
    )


def num_batches(sizes: Sequence[int], shares: Apportionment, mode: DropMode) -> int:
    """Batches of an epoch; 0 where a mode that drops finds no whole share.

    Args:
        sizes: rows of each type; types without a share in a batch decide nothing.
    """
    ends = [
        _type_batches(shares, kind, size, mode)
        for kind, size in enumerate(sizes)
        if shares.has_share(kind)
    ]
    return min(ends) if mode.startswith("first") else max(ends)


def _type_batches(shares: Apportionment, kind: int, size: int, mode: DropMode) -> int:
    """For how many batches one type suffices, with or without its rest."""
    if mode.startswith("first"):
        whole = batches_until(shares, kind, size + 1) - 1  # the last that repeats none
        has_rest = shares.before(whole)[kind] < size
        return whole + (has_rest and mode.endswith("fill"))
    until_seen = batches_until(shares, kind, size)
    is_filled_up = shares.before(until_seen)[kind] > size
    return until_seen - (is_filled_up and mode.endswith("drop"))


def batches_until(shares: Apportionment, kind: int, num_rows: int) -> int:
    """The fewest batches that take this many rows of a type."""
    most = 1
    while shares.before(most)[kind] < num_rows:
        most *= 2
    return bisect.bisect_left(
        range(most + 1), num_rows, key=lambda batches: shares.before(batches)[kind]
    )
