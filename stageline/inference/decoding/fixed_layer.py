"""Keys and values that a prompt brings and no step grows: of layers that attend to its images.

Rows have as many columns as their images have patches, rows of text alone have none. The buffers
are as wide as the fullest row, and zero behind each row's own columns: a layer that attends to
values of zero adds nothing to a row of text, and masks hide the rest for rows with fewer images.

Shapes: B rows, K heads of keys and values, F columns of the fullest row, D size of a head.
"""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class FixedColumns:
    """How many columns each row of a group has; all fixed layers of the group share it."""

    def __init__(self, num_rows: int = 0) -> None:
        self.lengths = [0] * num_rows

    @property
    def width(self) -> int:
        """Columns of the fullest row."""
        return max(self.lengths, default=0)


class FixedLayer(CacheLayerMixin):
    """One layer's fixed keys and values; None while no row of the group brought any.

    The library passes by a layer without any, which is what rows of text alone need.
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
    def is_initialized(self, value: bool) -> None:
        """The base class sets it; the keys tell."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The first pass brings all there is."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys and values [B, K, F, D] of a pass over prompts."""
        self.columns.lengths = [key_states.shape[-2]] * len(key_states)
        self._buffers = (key_states, value_states)
        self._show(len(key_states))
        return key_states, value_states

    def remove(self, index: int, num_rows: int) -> None:
        """Lets the last row take a row's place.

        Args:
            num_rows: how many are left.
        """
        for buffer in self._buffers:
            if index != num_rows:
                buffer[index] = buffer[num_rows]
        self._show(num_rows)

    def join(self, other: "FixedLayer", num_rows: int, num_new: int) -> None:
        """Takes another group's rows behind the own ones; `columns` counts them already."""
        if not self._buffers and not other._buffers:
            return
        rows = slice(num_rows, num_rows + num_new)
        self._make_room(rows, self._buffers or other._buffers)
        news = (other.keys, other.values)
        for buffer, new in zip(self._buffers, news, strict=True):
            buffer[rows] = 0
            if new is not None:
                buffer[rows, :, : new.shape[-2]] = new
        self._show(rows.stop)

    def _make_room(self, rows: slice, likes: tuple[torch.Tensor, ...]) -> None:
        """Buffers that are tall and wide enough, the rows before `rows` in them."""
        capacity, width = (self._buffers[0].shape[0:3:2]) if self._buffers else (0, 0)
        if rows.stop <= capacity and self.columns.width <= width:
            return
        if rows.stop > capacity:
            capacity = max(rows.stop, capacity * 3 // 2)
        width = max(self.columns.width, width)
        grown = []
        for place, like in enumerate(likes):
            new = like.new_zeros(capacity, like.shape[1], width, like.shape[3])
            if self._buffers:
                old = self._buffers[place][: rows.start]
                new[: rows.start, :, : old.shape[2]] = old
            grown.append(new)
        self._buffers = tuple(grown)

    def _show(self, num_rows: int) -> None:
        """Sets what the model reads; lets go of buffers that no row needs."""
        width = self.columns.width
        if not self._buffers or not width:
            self.drop()
            return
        self.keys, self.values = (buffer[:num_rows, :, :width] for buffer in self._buffers)

    def drop(self) -> None:
        """Lets go of the buffers."""
        self._buffers, self.keys, self.values = (), None, None

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.columns.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns.width, 0

    def get_max_length(self) -> int:
        return -1

    def row_buffers(self) -> tuple[torch.Tensor, ...]:
        """Buffers with a place for each row, and more."""
        return self._buffers

    def buffers(self) -> tuple[str, ...]:
        """What grows with the window: nothing."""
        return ()
