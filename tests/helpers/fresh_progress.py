"""The record of what a process does, as a new process has it."""

import time

from stageline import progress


def forget_progress() -> None:
    """Clear the record: this process may have trained before."""
    progress._place = progress.Progress(since=time.monotonic())
    progress._on_device = None
    progress._ahead.clear()
