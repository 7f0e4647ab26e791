"""Record step, operation, stage and micro-batch of a process for failure reports and the watchdog.

The record is replaced as a whole, so that another thread reads it without a lock. A device runs
behind the main thread: marks in its queue (events of torch, say) tell how far it is.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Progress:
    """State of a process at a moment."""

    operation: str = "start"  # "forward", "backward", "optimizer", "save", "data" ...
    step: int | None = None  # optimizer steps done; None before the loop
    stage: int | None = None
    micro_batch: int | None = None
    is_waiting: bool = False  # for another rank, so this is not the rank that hangs
    since: float = 0.0  # start of the operation, on the clock of `time.monotonic`

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        where = "" if self.stage is None else f" on stage {self.stage}"
        return f"{'waiting for ' if self.is_waiting else ''}{self.operation}{of}{where}"


_place = Progress(since=time.monotonic())
# (operation that begins at a mark, or None at an end; the mark)
_ahead: deque[tuple[Progress | None, Any]] = deque(maxlen=4096)  # no watchdog may read them
_on_device: Progress | None = None


def place() -> Progress:
    """Return the operation of the main thread."""
    return _place


def where() -> Progress:
    """Return the operation of this process, or of its device if behind; for one caller thread."""
    global _on_device
    with contextlib.suppress(RuntimeError):  # the device failed, and the main thread will report it
        while _ahead and _ahead[0][1].query():
            reached, _ = _ahead.popleft()
            _on_device = reached and replace(reached, since=time.monotonic())
    return _on_device or _place


def at_step(step: int) -> None:
    """Record the number of optimizer steps done."""
    global _place
    _place = replace(_place, step=step, since=time.monotonic())


@contextmanager
def doing(
    operation: str,
    *,
    stage: int | None = None,
    micro_batch: int | None = None,
    is_waiting: bool = False,
    mark: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """Record an operation of the main thread, and restart the previous one afterwards.

    After an exception the record stays, as the place of the failure. Other threads record nothing.

    Args:
        mark: sets a mark in the queue of the device that runs the operation.
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
