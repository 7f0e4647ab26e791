"""Peak memory of this process: of its GPU, or of the host where there is none."""

import resource
import sys

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch held on the GPU, or the largest resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gather_peaks(device: torch.device, *, group: dist.ProcessGroup | None = None) -> list[int]:
    """The peaks of all ranks of the group, on each of them."""
    own = torch.tensor([peak_memory(device)], dtype=torch.int64, device=device)
    peaks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peaks, own, group=group)
    return [int(peak) for peak in peaks]
