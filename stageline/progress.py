"""Where this process is: step, operation, stage, micro-batch. For failure reports and the watchdog.

One record for the process, exchanged as a whole, so that another thread reads it without a lock.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


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


_place = Progress(since=time.monotonic())


def place() -> Progress:
    """What this process does now."""
    return _place


def begin() -> None:
    """Forgets what was noted: for a process forked from one that has run something before."""
    global _place
    _place = Progress(since=time.monotonic())


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
) -> Iterator[None]:
    """Notes an operation of the main thread; afterwards what was noted before, begun anew.

    After an exception the note stays: it says where the failure happened. Other threads, which
    write checkpoints for example, leave no notes.
    """
    global _place
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _place
    _place = Progress(operation, before.step, stage, micro_batch, is_waiting, time.monotonic())
    yield
    _place = replace(before, step=_place.step, since=time.monotonic())
