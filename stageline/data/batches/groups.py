"""Groups of samples that are compared with each other: whole ones, wherever samples go.

A dataset part with groups has `group_size`: so many consecutive rows belong together. Knows nothing
of what is in a row. Others have groups of one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import Subset

from stageline.errors import UserError


def group_size_of(dataset: Any) -> int:
    """Rows of a group; 1 where a dataset has none.

    Raises:
        UserError: `group_size` is no such number, or the last group is not whole.
    """
    if isinstance(dataset, Subset):  # made of whole groups, by `whole_groups` and `some_rows`
        return group_size_of(dataset.dataset)
    size = getattr(dataset, "group_size", 1)
    name = type(dataset).__name__
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(
            f"the dataset {name} has group_size {size!r}. A number from 1 upwards was expected, "
            "because so many consecutive rows are a group: correct the dataset part."
        )
    if len(dataset) % size:
        raise UserError(
            f"the dataset {name} has {len(dataset)} rows in groups of {size}, so the last group is "
            "not whole. Whole groups were expected, because a group is compared as one: correct "
            "the dataset part."
        )
    return size


def check_batch_sizes(
    *, batch_size: int, micro_batch_size: int, group_size: int, is_packed: bool = False
) -> None:
    """Refuses batches that would cut groups.

    Raises:
        UserError: names both numbers and the legal ones near them.
    """
    if group_size == 1:
        return
    if is_packed:
        raise UserError(
            f"`packing` came with a dataset of groups of {group_size} samples. Rows of one sample "
            "each were expected, because the samples of a group have to stay side by side in a "
            "micro-batch, and packing moves them: leave `packing` out."
        )
    if batch_size % group_size == 0 and micro_batch_size % group_size == 0:
        return
    legal = [
        f"`micro_batch_size` {micro} with `batch_size` {_either(_near(batch_size, micro))}"
        for micro in _near(micro_batch_size, group_size)
    ]
    raise UserError(
        f"`batch_size` {batch_size} and `micro_batch_size` {micro_batch_size} do not both hold "
        f"whole groups of {group_size} samples. Multiples of {group_size} were expected, because "
        "both count samples, and a group (anchor, positive, negatives) travels in one "
        f"micro-batch: set {', or '.join(legal)}."
    )


def whole_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """All rows of the groups that the given rows are in, in order."""
    groups = sorted({row // group_size for row in rows})
    return expand(groups, group_size)


def full_groups(rows: Iterable[int], group_size: int) -> list[int]:
    """The rows of those groups that all rows of are given, in order."""
    counts = Counter(row // group_size for row in rows)
    return expand(sorted(group for group in counts if counts[group] == group_size), group_size)


def expand(groups: Sequence[int], group_size: int) -> list[int]:
    """The rows of groups, in the order of the groups."""
    if group_size == 1:
        return list(groups)
    return [group * group_size + place for group in groups for place in range(group_size)]


def some_rows(dataset: Any, count: int) -> Subset:
    """At most `count` rows, spread evenly over the set; of groups whole ones, at least one."""
    size = group_size_of(dataset)
    total = len(dataset) // size
    wanted = min(max(count // size, 1), total)
    return Subset(dataset, expand([i * total // wanted for i in range(wanted)], size))


def _near(number: int, divisor: int) -> list[int]:
    """The multiples below and above a number; itself where it is one."""
    below = number // divisor * divisor
    near = {below, number if below == number else below + divisor}
    return sorted(near - {0})


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
