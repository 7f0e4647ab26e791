"""Which samples of a step travel together, and in which order. Pure integers: lengths in tokens.

A micro-batch costs its rows times the longest of them, for padding is computed too. Nothing here
changes what belongs to a step, so the gradient is that of any other arrangement.
"""

from collections.abc import Sequence

from stageline.errors import UserError


def group_by_length(lengths: Sequence[int], num_groups: int) -> list[list[int]]:
    """Indices in groups of near-equal length and near-equal cost; none is empty.

    Rows are cut in order of length, long ones into small groups and short ones into large groups,
    so that the costliest group is as cheap as any such cut allows. So no micro-batch is larger,
    in tokens, than the longest rows would be in groups of equal number.
    """
    assert 1 <= num_groups <= len(lengths)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    low, high = lengths[order[0]], lengths[order[0]] * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(order, lengths, most=middle)) <= num_groups:
            high = middle
        else:
            low = middle + 1
    groups = _cut(order, lengths, most=low)
    while len(groups) < num_groups:
        costliest = max(
            (group for group in groups if len(group) > 1),
            key=lambda group: padded_cost([lengths[index] for index in group]),
        )
        place = groups.index(costliest)
        half = len(costliest) // 2
        groups[place : place + 1] = [costliest[:half], costliest[half:]]
    return groups


def _cut(order: Sequence[int], lengths: Sequence[int], *, most: int) -> list[list[int]]:
    """The fewest groups, each of at most that cost; `order` begins with the longest row."""
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= most:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def padded_cost(lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch with its padding."""
    return len(lengths) * max(lengths, default=0)


def order_by_cost(costs: Sequence[int]) -> list[int]:
    """Indices so that costs rise to the middle and fall again.

    The first micro-batch alone fills the pipeline and the last alone drains it, so both are cheap
    ones; in between stages work on neighbours at the same time, and wait for each other by the
    difference of their costs (simulated in tests/unit/test_arrange.py).
    """
    rising = sorted(range(len(costs)), key=lambda index: (costs[index], index))
    return rising[::2] + rising[1::2][::-1]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in rows of at most `capacity` tokens, by best fit: the fullest row that has room.

    Raises:
        UserError: one is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sample of {length} tokens does not fit a row of --max-token-num {capacity}. "
                "Samples are packed whole, because no token may see another sample: raise "
                "--max-token-num, or let the collate_fn part limit the length."
            )
        fits = [place for place in range(len(rows)) if room[place] >= length]
        if fits:
            place = min(fits, key=lambda place: (room[place], place))
        else:
            place = len(rows)
            rows.append([])
            room.append(capacity)
        rows[place].append(index)
        room[place] -= length
    return rows


def pack_into(lengths: Sequence[int], capacity: int, num_rows: int) -> list[list[int]]:
    """As `pack`, but in exactly `num_rows` rows, which must be enough; some may be empty.

    More rows than are needed are filled evenly, so that none is computed for nothing.
    """
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
