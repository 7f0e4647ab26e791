"""Queues that work as late as their marks allow: a wait that is missing shows as wrong numbers.

On a CPU work that is done at once hides every missing wait. These keep what they are given until
a caller waits for a mark; then they do what the mark needs and no more.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from stageline.streaming.lanes import BufferPool, Lane, Mark

_LOCK = threading.RLock()  # the optimizer's thread waits for marks, too


class LateMark:
    """A point in a late queue."""

    def __init__(self, queue: "LateQueue", count: int) -> None:
        self._queue = queue
        self._count = count

    def wait(self) -> None:
        with _LOCK:
            self._queue.work_to(self._count)


class LateQueue:
    """Keeps work until a mark behind it is waited for."""

    def __init__(self) -> None:
        self._kept: deque[Callable[[], object]] = deque()
        self._given = self._done = 0

    def run(self, work: Callable[[], object]) -> None:
        with _LOCK:
            self._kept.append(work)
            self._given += 1

    def record(self) -> Mark:
        return LateMark(self, self._given)

    def after(self, mark: Mark) -> None:
        self.run(mark.wait)

    def uses(self, tensor: torch.Tensor) -> None:
        pass

    def work_to(self, count: int) -> None:
        """Do the work that was queued before this point."""
        while self._done < count:
            work = self._kept.popleft()
            self._done += 1
            work()


def late_lanes(count: int, *, budget: int | None = None) -> Sequence[Lane]:
    """Lanes on the host with late queues."""
    cpu = torch.device("cpu")
    return [
        Lane(cpu, LateQueue(), LateQueue(), LateQueue(), BufferPool(cpu, budget))
        for _ in range(count)
    ]
