"""Keys and values of a group of sequences that are answered together, on one stage.

The columns of a group are a time axis that all its rows share: the tokens of a row are contiguous
and end in the last column, so that one step appends one column for all. A row that joins is
written so that it ends there too; the last row takes the place of a row that leaves; columns that
no row uses any more fall off the front without a copy. The code of transformers makes masks from
this as it does for a batch padded on the left. Layers with a sliding window keep all columns, and
the mask hides those outside the window.

Shapes: B rows, K heads of keys and values, C columns, D size of a head.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from stageline.device import sent

# Keys and values that a prompt brings and no step grows: of layers that attend to its images.
# Rows have as many columns as their images have patches, rows of only text have none. The buffers
# are as wide as the fullest row, and zero behind each row's own columns: a layer that attends to
# values of zero adds nothing to a row of text, and masks hide the rest for rows with fewer images.
#
# Shapes: B rows, K heads of keys and values, F columns of the fullest row, D size of a head.


class FixedColumns:
    """The number of columns of each row of a group; all its fixed layers share it."""

    def __init__(self, num_rows: int = 0) -> None:
        self.lengths = [0] * num_rows

    @property
    def width(self) -> int:
        """Columns of the fullest row."""
        return max(self.lengths, default=0)


class FixedLayer(CacheLayerMixin):
    """One layer's fixed keys and values; None while no row of the group brought any.

    transformers skips a layer without any, as rows of only text need.
    """

    is_sliding = False

    def __init__(self, columns: FixedColumns) -> None:
        self.columns = columns
        self._buffers: tuple[torch.Tensor, ...] = ()
        super().__init__()

    @property
    def is_initialized(self) -> bool:
        """Whether there is something to attend to."""
        return self.keys is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None: ...  # the base class sets it

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys and values [B, K, F, D] of a pass over prompts."""
        self.columns.lengths = [key_states.shape[-2]] * len(key_states)
        self._buffers = (key_states, value_states)
        self._show(len(key_states))
        return key_states, value_states

    def remove(self, index: int, num_rows: int) -> None:
        """Let the last row take a row's place; `num_rows` are left."""
        for buffer in self._buffers:
            if index != num_rows:
                buffer[index] = buffer[num_rows]
        self._show(num_rows)

    def repeat(self, count: int, num_rows: int) -> None:
        """Repeat each row `count` times; `columns` is updated afterwards."""
        if self._buffers:
            rows = (buffer[:num_rows] for buffer in self._buffers)
            self._buffers = tuple(buffer.repeat_interleave(count, dim=0) for buffer in rows)
            self._show(num_rows * count)

    def join(self, other: "FixedLayer", num_rows: int, num_new: int) -> None:
        """Append another group's rows; `columns` counts them already."""
        if not self._buffers and not other._buffers:
            return
        rows = slice(num_rows, num_rows + num_new)
        capacity, width = (self._buffers[0].shape[0:3:2]) if self._buffers else (0, 0)
        if rows.stop > capacity or self.columns.width > width:
            if rows.stop > capacity:
                capacity = max(rows.stop, capacity * 3 // 2)
            width = max(self.columns.width, width)
            grown = []
            for place, like in enumerate(self._buffers or other._buffers):
                buffer = like.new_zeros(capacity, like.shape[1], width, like.shape[3])
                if self._buffers:
                    old = self._buffers[place][:num_rows]
                    buffer[:num_rows, :, : old.shape[2]] = old
                grown.append(buffer)
            self._buffers = tuple(grown)
        news = (other.keys, other.values)
        for buffer, new in zip(self._buffers, news, strict=True):
            buffer[rows] = 0
            if new is not None:
                buffer[rows, :, : new.shape[-2]] = new
        self._show(rows.stop)

    def _show(self, num_rows: int) -> None:
        """Set the keys and values that the model reads; free buffers that no row needs."""
        width = self.columns.width
        if not self._buffers or not width:
            self._buffers, self.keys, self.values = (), None, None
            return
        self.keys, self.values = (buffer[:num_rows, :, :width] for buffer in self._buffers)

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.columns.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns.width, 0

    def get_max_length(self) -> int:
        return -1

    def row_buffers(self) -> tuple[torch.Tensor, ...]:
        """Buffers with a place for each row, and more."""
        return self._buffers


Item = TypeVar("Item")
COLUMNS_AT_ONCE = 64  # buffers grow by a multiple of this, and by a quarter


def whole_columns(count: int) -> int:
    """Return the columns of a buffer for `count` of them, a multiple of `COLUMNS_AT_ONCE`."""
    return -(-count // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE


def take_out(items: list[Item], index: int) -> Item:
    """Removes an item as a cache removes a row: the last one takes its place."""
    items[index], items[-1] = items[-1], items[index]
    return items.pop()


class Window:
    """The part of its buffers that a group uses; all layers of a group share it.

    Attributes:
        first_columns: of each row, the column of its first token.
        start, end: columns in use: those before `start` are free, `end` is the next one.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self.first_columns = [0] * num_rows
        self.start = self.end = 0
        self.row_capacity = self.column_capacity = 0

    @property
    def num_rows(self) -> int:
        return len(self.first_columns)

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.end - self.start

    @property
    def is_ragged(self) -> bool:
        """Whether some row begins behind another."""
        return any(first != self.start for first in self.first_columns)

    def trim(self) -> None:
        """Frees the columns that no row uses any more."""
        self.start = min(self.first_columns, default=self.end)

    def mask(self, num_new: int, device: torch.device) -> torch.Tensor:
        """Return which columns hold tokens [B, C], the new ones after the old ones included."""
        columns_C = torch.arange(self.start, self.end + num_new, device=device)
        firsts_B = sent(torch.tensor(self.first_columns), device)
        return (columns_C >= firsts_B[:, None]).long()


class WindowLayer(CacheLayerMixin):
    """One layer's keys and values. Layers of other stages only tell how long the group is."""

    is_sliding = False  # it keeps all columns, and masks are made for all
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: Window) -> None:
        self.window = window
        super().__init__()
        # some models ask how much a layer of another stage holds
        self.keys = self.values = torch.empty(0)

    @property
    def is_initialized(self) -> bool:
        """Whether there is anything before this pass; models tell a first pass by it."""
        return self.window.width > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None: ...  # the base class sets it

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the buffers; what of them is read was written, or made zero, before."""
        self.keys, self.values = (self.new_buffer(like) for like in (key_states, value_states))

    def new_buffer(self, like_BKCD: torch.Tensor) -> torch.Tensor:
        """Return an empty buffer of the window's capacity."""
        _, num_heads, _, size = like_BKCD.shape
        window = self.window
        return like_BKCD.new_empty(window.row_capacity, num_heads, window.column_capacity, size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new columns [B, K, T, D]; returns all columns in use, with them."""
        if not self.keys.numel():
            self.lazy_initialization(key_states, value_states)
        window, num_new = self.window, key_states.shape[-2]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            self._columns(buffer, window.end, num_new).copy_(states)
        used = window.start, window.width + num_new
        return self._columns(self.keys, *used), self._columns(self.values, *used)

    def _columns(self, buffer: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return some columns of all rows in one operation: a step does this four times a layer."""
        _, num_heads, _, size = buffer.shape
        shape = (self.window.num_rows, num_heads, count, size)
        return buffer.as_strided(shape, buffer.stride(), first * size)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.width + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.width

    def get_max_length(self) -> int:
        return -1

    def buffers(self) -> Iterable[str]:
        """Names of what is kept here; nothing on the stages that do not own the layer."""
        return ("keys", "values") if self.keys.numel() else ()


class GroupCache(Cache):
    """The cache of one group on one stage.

    Args:
        num_layers: of the whole model: layers of others are there too, and empty.
        num_rows: rows that the first pass writes.
        fixed_layers: those that keep what prompts bring and grow by no step.

    Attributes:
        most: (rows, columns) that the group will have at most: buffers get no larger, and rows find
            their place at once. None: not known, and buffers grow ahead.
    """

    def __init__(
        self, num_layers: int, num_rows: int = 0, *, fixed_layers: Collection[int] = ()
    ) -> None:
        self.window, self.fixed = Window(num_rows), FixedColumns(num_rows)
        super().__init__(
            layers=[
                FixedLayer(self.fixed) if index in fixed_layers else WindowLayer(self.window)
                for index in range(num_layers)
            ]
        )
        self.window_layers = [layer for layer in self.layers if isinstance(layer, WindowLayer)]
        self.fixed_layers = [layer for layer in self.layers if isinstance(layer, FixedLayer)]
        self.most: tuple[int, int] | None = None

    def begin(self, num_new: int, *, lengths: Sequence[int] | None = None, room: int = 0) -> None:
        """Makes room for a pass that appends `num_new` columns.

        Args:
            lengths: on the first pass: tokens of each row, the rest of the columns is padding.
            room: columns of this pass and of those that are to follow soon.

        Raises:
            RuntimeError: memory ran out, and nothing can be read from the cache any more.
        """
        window = self.window
        if lengths is not None:
            window.first_columns = [num_new - length for length in lengths]
        if window.end + num_new > window.column_capacity:
            self._relocate(window.num_rows, window.width, max(num_new, room))

    def advance(self, num_new: int) -> None:
        """Takes the columns that a pass has written as part of the group."""
        self.window.end += num_new

    def remove(self, index: int) -> None:
        """Forgets a row; the last one takes its place."""
        window, last = self.window, self.window.num_rows - 1
        take_out(self.fixed.lengths, index)
        if index != last:
            # hidden columns too: those of a row that leaves need not be finite
            columns = slice(window.start, window.end)
            for buffer in self._all_buffers():
                buffer[index, :, columns] = buffer[last, :, columns]
        for layer in self.fixed_layers:
            layer.remove(index, last)
        take_out(window.first_columns, index)
        window.trim()

    def repeat(self, count: int) -> None:
        """Repeat each row `count` times, next to one another: answers to the same prompt."""
        window, num_rows = self.window, self.window.num_rows
        window.row_capacity = num_rows * count
        for layer in self.window_layers:
            for name in layer.buffers():
                rows = getattr(layer, name)[:num_rows]
                setattr(layer, name, rows.repeat_interleave(count, dim=0))
        for fixed in self.fixed_layers:
            fixed.repeat(count, num_rows)
        for lengths in (window.first_columns, self.fixed.lengths):
            lengths[:] = [length for length in lengths for _ in range(count)]

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        for values in (self.window.first_columns, self.fixed.lengths):
            values[one], values[other] = values[other], values[one]
        fixed = [buffer for layer in self.fixed_layers for buffer in layer.row_buffers()]
        columns = slice(self.window.start, self.window.end)
        for buffer in [*fixed, *(buffer[:, :, columns] for buffer in self._all_buffers())]:
            buffer[[one, other]] = buffer[[other, one]]

    def join(self, other: "GroupCache") -> None:
        """Takes all rows of another group behind the own ones; raises as `begin`."""
        if not self.window.num_rows:
            self.__dict__.update(other.__dict__)
            return
        mine, theirs = self.window, other.window
        num_rows, width = mine.num_rows + theirs.num_rows, max(mine.width, theirs.width)
        if num_rows > mine.row_capacity or theirs.width > mine.end:
            self._relocate(num_rows, width, 1)
        self._join_window(other)
        self.fixed.lengths += other.fixed.lengths
        for own, new in zip(self.fixed_layers, other.fixed_layers, strict=True):
            own.join(new, mine.num_rows, theirs.num_rows)
        shift = mine.end - theirs.end
        mine.first_columns += [first + shift for first in theirs.first_columns]
        mine.trim()

    def _join_window(self, other: "GroupCache") -> None:
        """Copy the rows and zero hidden columns: a row that left may have put NaN or inf there."""
        mine, theirs = self.window, other.window
        old, new = slice(0, mine.num_rows), slice(mine.num_rows, mine.num_rows + theirs.num_rows)
        begin = mine.end - theirs.width
        before, wider = slice(min(mine.start, begin), begin), slice(begin, mine.start)
        into, out_of = slice(begin, mine.end), slice(theirs.start, theirs.end)
        for own, news in zip(self._all_buffers(), other._all_buffers(), strict=True):
            own[new, :, before] = 0
            own[old, :, wider] = 0  # nothing, where they start behind the own ones
            own[new, :, into] = news[: theirs.num_rows, :, out_of]

    def num_bytes(self) -> int:
        """Return what the buffers of the window take."""
        return sum(self.buffer_bytes())

    def buffer_bytes(self) -> list[int]:
        """Return the bytes of each buffer of the window."""
        return [buffer.nbytes for buffer in self._all_buffers()]

    def _all_buffers(self) -> list[torch.Tensor]:
        return [getattr(layer, name) for layer in self.window_layers for name in layer.buffers()]

    def _relocate(self, num_rows: int, width: int, num_new: int) -> None:
        """Move all to buffers for `num_rows` rows; the columns in use then end at `width`."""
        window = self.window
        needed = width + num_new
        columns, rows = needed + needed // 4, window.row_capacity * 3 // 2
        if self.most is not None:
            rows, columns = self.most[0], min(columns, self.most[1])
        window.column_capacity = whole_columns(max(needed, columns))
        if num_rows > window.row_capacity:
            window.row_capacity = max(num_rows, rows)
        old, new = slice(window.start, window.end), slice(width - window.width, width)
        for layer in self.window_layers:
            for name in layer.buffers():  # one after the other: old and new of one at a time
                buffer = getattr(layer, name)
                moved = layer.new_buffer(buffer)
                moved[: window.num_rows, :, new] = buffer[: window.num_rows, :, old]
                setattr(layer, name, moved)
        shift = width - window.end
        window.first_columns = [first + shift for first in window.first_columns]
        window.start, window.end = new.start, new.stop
