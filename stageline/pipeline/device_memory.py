"""How much memory a rank may fill: of its GPU, or its share of the host's."""

import os
from pathlib import Path

import torch

KEPT_FREE = 0.05  # of a GPU: the allocator's gaps and the libraries
_GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def device_capacity(device: torch.device, *, num_local_ranks: int, gib: float | None = None) -> int:
    """Bytes that one rank may fill on this device.

    Args:
        gib: what the user says; None: ask the device.
        num_local_ranks: processes of this machine, which share its memory on a CPU.
    """
    if gib is not None:
        return int(gib * 1024**3)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        return int(free - KEPT_FREE * total)
    return max(0, host_memory() // num_local_ranks - _resident())


def host_memory() -> int:
    """Bytes of the host's memory, or of the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _GROUP_LIMITS:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def _resident() -> int:
    """What this process holds before a model is built: the interpreter and its libraries."""
    status = Path("/proc/self/statm")
    pages = int(status.read_text().split()[1]) if status.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")
