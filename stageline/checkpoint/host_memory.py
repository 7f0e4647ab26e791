"""Makes the C library give freed host memory back while weights are read. Linux with glibc only."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
