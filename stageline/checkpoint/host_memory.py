"""Host memory: how much is left, and giving it back while weights are read.

The second is for Linux with glibc only: elsewhere it does nothing.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING = 1 << 16
# where glibc's own, moving threshold ends up in a process that frees large tensors
_AFTERWARDS = 1 << 25


@contextmanager
def returns_freed_memory() -> Iterator[None]:
    """While open, blocks from 64 KiB on go back to the system as soon as they are freed.

    Fused experts are made of hundreds of small tensors. What these leave behind in the heap is too
    scattered for the fused one: without this a rank's peak is 2.1 times its stage, with it 1.1
    (benchmarks/load_memory.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)
        mallopt(_M_TRIM_THRESHOLD, 2 * _AFTERWARDS)


def available_memory() -> int | None:
    """Bytes that this process may still take of the host, or of its container; None: not known."""
    found = [
        amount for amount in (_available_of_host(), _available_of_container()) if amount is not None
    ]
    return min(found, default=None)


def _available_of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _available_of_container() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit
        return None
    # pages of files are given back when memory is wanted
    return limit - used + int(facts.get("inactive_file", 0))
