"""Best-fit decreasing packing of lengths into rows of one capacity. Pure integers.

Longest first, each into the row with the least room that takes it. Rows with equal room are alike,
so all lengths of one size go into all rows of one room at once: as fast for many lengths as for
few, and the same rows as one by one.
"""

import numpy


def best_fit(lengths: numpy.ndarray, capacity: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Which lengths share a row.

    Args:
        lengths: int64 [N], 0 < length <= capacity.

    Returns:
        ends: int64 [rows]: row r has members[ends[r - 1] : ends[r]].
        members: int64 [N], indices of lengths: rising within a row; rows in the order of their
            first members.
    """
    if not len(lengths):
        return numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.int64)
    assert 0 < lengths.min() and lengths.max() <= capacity
    rows = _Rows(len(lengths), capacity)
    by_size = numpy.argsort(lengths, kind="stable")
    sizes, starts = numpy.unique(lengths[by_size], return_index=True)
    stops = [*starts[1:].tolist(), len(lengths)]
    for size, start, stop in reversed(list(zip(sizes.tolist(), starts.tolist(), stops))):
        rows.put(size, by_size[start:stop])
    _, first_members = numpy.unique(rows.row_of, return_index=True)
    rank = numpy.empty_like(first_members)
    rank[numpy.argsort(first_members)] = numpy.arange(len(first_members))
    row_of = rank[rows.row_of]
    return numpy.cumsum(numpy.bincount(row_of)), numpy.argsort(row_of, kind="stable")


class _Rows:
    """Rows by the room left in them."""

    def __init__(self, num_lengths: int, capacity: int) -> None:
        self.row_of = numpy.zeros(num_lengths, numpy.int64)
        self._capacity = capacity
        self._num_rows = 0
        self._with_room: list[list[numpy.ndarray]] = [[] for _ in range(capacity + 1)]
        self._rooms = 0  # bit r is set where there are rows of room r

    def put(self, size: int, members: numpy.ndarray) -> None:
        """Puts members of one size into the tightest rows that take them, then into new ones."""
        while len(members):
            room, rows = self._tightest(size, len(members))
            each = room // size
            num_full, rest = divmod(min(len(members), len(rows) * each), each)
            placed = num_full * each + rest
            self.row_of[members[:placed]] = numpy.repeat(rows, each)[:placed]
            members = members[placed:]
            self._add(room, rows[num_full + bool(rest) :])
            self._add(room - each * size, rows[:num_full])
            if rest:
                self._add(room - rest * size, rows[num_full : num_full + 1])

    def _tightest(self, size: int, count: int) -> tuple[int, numpy.ndarray]:
        fitting = self._rooms >> size
        if not fitting:
            num_new = -(-count // (self._capacity // size))
            self._num_rows += num_new
            return self._capacity, numpy.arange(self._num_rows - num_new, self._num_rows)
        room = size + (fitting & -fitting).bit_length() - 1
        rows = self._with_room[room].pop()
        if not self._with_room[room]:
            self._rooms ^= 1 << room
        return room, rows

    def _add(self, room: int, rows: numpy.ndarray) -> None:
        if len(rows):
            self._with_room[room].append(rows)
            self._rooms |= 1 << room
