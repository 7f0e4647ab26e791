"""Where this process is: step, operation, stage, micro-batch. For failure reports and the watchdog.

One record for the process, exchanged as a whole, so that another thread reads it without a lock.
A device works behind the main thread, which waits somewhere else: marks in its queue tell how far.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

MOST_MARKS = 4096  # kept where nobody asks


@dataclass(frozen=True)
class Progress:
    """What a process does at a moment.

    Attributes:
        operation: "forward", "backward", "optimizer", "save", "data", "start" ...
        step: optimizer steps done; None before the loop.
        is_waiting: for another rank; such a rank is not the one that hangs.
        since: when it began, on the clock of `time.monotonic`.
    """

    operation: str = "start"
    step: int | None = None
    stage: int | None = None
    micro_batch: int | None = None
    is_waiting: bool = False
    since: float = 0.0

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        where = "" if self.stage is None else f" on stage {self.stage}"
        return f"{'waiting for ' if self.is_waiting else ''}{self.operation}{of}{where}"


class Mark(Protocol):
    """A point in the queue of a device, such as an event of torch."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


_place = Progress(since=time.monotonic())
# what begins at a mark; None: an end
_ahead: deque[tuple[Progress | None, Mark]] = deque(maxlen=MOST_MARKS)
_on_device: Progress | None = None


def place() -> Progress:
    """What the main thread does now."""
    return _place


def where() -> Progress:
    """What this process does, or its device where that is behind; one thread alone asks.

    On a device `since` is when that thread first saw it there.
    """
    global _on_device
    with contextlib.suppress(RuntimeError):  # the device failed: the main thread will tell
        while _ahead and _ahead[0][1].query():
            reached, _ = _ahead.popleft()
            _on_device = reached and replace(reached, since=time.monotonic())
    return _on_device or _place


def begin() -> None:
    """Forgets what was noted: for a process forked from one that has run something before."""
    global _place, _on_device
    _place, _on_device = Progress(since=time.monotonic()), None
    _ahead.clear()


def at_step(step: int) -> None:
    """Notes how many optimizer steps are done."""
    global _place
    _place = replace(_place, step=step, since=time.monotonic())


@contextmanager
def doing(
    operation: str,
    *,
    stage: int | None = None,
    micro_batch: int | None = None,
    is_waiting: bool = False,
    mark: Callable[[], Mark] | None = None,
) -> Iterator[None]:
    """Notes an operation of the main thread; afterwards what was noted before, begun anew.

    After an exception the note stays: it says where the failure happened. Other threads, which
    write checkpoints for example, leave no notes.

    Args:
        mark: sets a mark in the queue of the device that does the operation.
    """
    global _place
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _place
    _place = Progress(operation, before.step, stage, micro_batch, is_waiting, time.monotonic())
    if mark is not None:
        _ahead.append((_place, mark()))
    yield
    if mark is not None:
        _ahead.append((None, mark()))
    _place = replace(before, step=_place.step, since=time.monotonic())
