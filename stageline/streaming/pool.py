"""Buffers of one device that are used again, within a budget.

A buffer that was given back may still be read by work on its way: it comes with the mark that the
next user's queue waits for. So nothing depends on when memory is freed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class DeviceBudgetError(MemoryError):
    """More bytes are needed at once than the budget of a lane allows."""


@dataclass(eq=False)
class Buffer:
    """Bytes of a device.

    Attributes:
        mark: of the last work that uses them.
    """

    data: torch.Tensor
    mark: Any

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


class BufferPool:
    """Hands out buffers, idle ones first.

    Args:
        budget: bytes that all buffers together may have; None: no limit.
        allocate: number of bytes -> uint8 tensor of the device.

    Attributes:
        peak_bytes: the most bytes that all buffers together had.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self.budget = budget
        self.held_bytes = 0
        self.peak_bytes = 0
        self._idle: list[Buffer] = []
        self._allocate = allocate or self._plain

    def take(self, num_bytes: int, queue: Any) -> Buffer:
        """A buffer of at least so many bytes; `queue` waits until nobody uses it any more.

        Raises:
            DeviceBudgetError: the budget has no room for it.
        """
        fitting = [each for each in self._idle if each.num_bytes >= num_bytes]
        # one that is much larger would be missing where it is needed
        fitting = [each for each in fitting if each.num_bytes <= max(2 * num_bytes, 1 << 16)]
        if fitting:
            found = min(fitting, key=lambda each: each.num_bytes)
            self._idle.remove(found)
            queue.after(found.mark)
            return found
        self._make_room(num_bytes)
        data = self._allocate(num_bytes)  # it may fail: only then is it counted
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Buffer(data, None)

    def give(self, buffer: Buffer, mark: Any) -> None:
        """Takes a buffer back; work up to `mark` still uses it."""
        buffer.mark = mark
        self._idle.append(buffer)

    def _make_room(self, num_bytes: int) -> None:
        """Drops idle buffers, the largest first, until a new one fits."""
        if self.budget is None:
            return
        idle = sum(each.num_bytes for each in self._idle)
        if self.held_bytes - idle + num_bytes > self.budget:  # to drop them all would not help
            raise DeviceBudgetError(
                f"{num_bytes:,} bytes are needed on {self.device} beside "
                f"{self.held_bytes - idle:,} in use; the budget is {self.budget:,}: allow more, or "
                "cut the model into smaller stages (execute_plan)"
            )
        self._idle.sort(key=lambda each: each.num_bytes)
        while self.held_bytes + num_bytes > self.budget:
            dropped = self._idle.pop()
            dropped.mark.wait()  # its memory may go to others at once
            self.held_bytes -= dropped.num_bytes

    def _plain(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
