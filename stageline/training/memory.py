"""Peak memory of this process: of its GPU, or of the host where there is none."""

import re
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stageline import progress
from stageline.training.step import TrainStep, current_shapes

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


# -- what fills the memory of a rank: for the report of a run that has no memory left -------------
# Counts what is alive; allocates nothing on the device. How a device fills before a run is planned
# in pipeline/memory_plan.py.

_STATUS = Path("/proc/self/status")


class MemoryAccount:
    """Describes what fills the memory of this rank.

    Args:
        remedies: what the options of the run leave to change, the best first.

    Attributes:
        train_step: set it once it is there; before that only remedies are told.
    """

    def __init__(self, device: torch.device, remedies: Sequence[str]) -> None:
        self.device = device
        self.remedies = list(remedies)
        self.train_step: TrainStep | None = None

    def describe(self) -> str:
        """One or two sentences: shape of the micro-batch, what is in use and by what, remedies."""
        parts = [_describe_micro_batch(), self._describe_use(), self._describe_remedies()]
        return " ".join(filter(None, parts))

    def parts(self) -> dict[str, int]:
        """Bytes by name; what is none of weights, gradients and optimizer state is left out."""
        step = self.train_step
        if step is None:
            return {}
        weights = [weight for stage in step.runner.local for weight in stage.parameters()]
        owned = list(step.weights.parameters.values())
        states = [] if step.optimizer is None else step.optimizer.state.values()
        state = [value for values in states for value in values.values()]
        grads = [parameter.grad for parameter in (*weights, *owned)]
        return {
            "weights": _bytes([*weights, *owned]),
            "gradients": _bytes(grad for grad in grads if grad is not None),
            "optimizer state": _bytes(value for value in state if isinstance(value, torch.Tensor)),
        }

    def _describe_use(self) -> str:
        used, total = used_memory(self.device)
        parts = self.parts()
        if not parts or used is None:
            return ""
        rest = max(0, used - sum(parts.values()))
        name = "activations and the rest"
        listed = ", ".join(f"{name} {_gib(count)}" for name, count in {**parts, name: rest}.items())
        of = f" of {_gib(total)}" if total else ""
        peak = peak_memory(self.device)
        return f"In use: {_gib(used)}{of} ({listed}; the peak was {_gib(peak)})."

    def _describe_remedies(self) -> str:
        return f"What helps: {'; '.join(self.remedies[:3])}." if self.remedies else ""


def used_memory(device: torch.device) -> tuple[int | None, int | None]:
    """(bytes in use, bytes there are): of the GPU, or of this process and its host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    if not _STATUS.exists():
        return None, None
    found = re.search(r"^VmRSS:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return (int(found[1]) * 1024 if found else None), None


def _describe_micro_batch() -> str:
    index, shapes = progress.place().micro_batch, current_shapes()
    if index is None or index >= len(shapes):
        return ""
    return f"It has {shapes[index][0]} x {shapes[index][1]} tokens."


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's part of each, each memory once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in local}.values())


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
