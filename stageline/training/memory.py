"""Peak memory of this process: of its GPU, or of the host where there is none."""

import re
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch held on the GPU, or the largest resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_memory()


def peak_host_memory() -> int:
    """Bytes of the largest resident set of this process so far."""
    if _STATUS.exists():
        peak = parse_peak(_STATUS.read_text())
        if peak is not None:
            return peak
    # elsewhere; not the first choice, since it also counts the program that started this one
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def parse_peak(status: str) -> int | None:
    """Bytes of the line `VmHWM` of /proc/self/status; None where a kernel leaves it out."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def gather_peaks(device: torch.device, *, group: dist.ProcessGroup | None = None) -> list[int]:
    """The peaks of all ranks of the group, on each of them; without a group of this one alone."""
    if not dist.is_initialized():
        return [peak_memory(device)]
    own = torch.tensor([peak_memory(device)], dtype=torch.int64, device=device)
    peaks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peaks, own, group=group)
    return [int(peak) for peak in peaks]
