"""Memory: how much of the host is left, giving it back while weights are read, torch's blocks.

Giving back is for Linux with glibc only: elsewhere it does nothing.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# settings of torch's allocators; who sets one of them has decided for himself
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_ROUND_UP = "pinned_max_round_threshold_mb"  # blocks above it are as long as was asked for
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


def settle_allocators() -> None:
    """Sets torch's allocators for GPUs, before the first one is used; not where the user has.

    Segments that grow: micro-batches have lengths of their own, and what one length leaves behind
    is of no use to the next. Pinned blocks of the size that was asked for: torch would round each
    up to a power of two, which of a large layer's weights can be twice their memory.
    """
    is_settled = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if is_settled or not torch.cuda.is_available():
        return
    wanted = "expandable_segments:True"
    # a key that a release does not know would end the run
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if header.is_file() and _ROUND_UP.removesuffix("_mb") in header.read_text(errors="replace"):
        wanted += f",{_ROUND_UP}:1"
    os.environ[ALLOCATOR_VARIABLES[0]] = wanted


def pinned_block(num_bytes: int) -> int:
    """The bytes that torch takes of the host for a pinned tensor of so many."""
    told = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    found = re.search(rf"{_ROUND_UP}:(\d+)", told)
    if num_bytes == 0 or (found is not None and num_bytes > int(found[1]) << 20):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()
