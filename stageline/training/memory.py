"""Memory of this process, of its GPU or the host: its peak, and what fills it when it is full.

Counts what is alive; allocates nothing on the device. How a device fills before a run is planned in
planner/estimate.py.
"""

import re
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stageline import progress
from stageline.device import is_accelerator
from stageline.training.step import TrainStep, current_shapes


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch held on the device, or the largest resident set of the process."""
    if is_accelerator(device):
        return torch.get_device_module(device).max_memory_allocated(device)
    peak = read_status("VmHWM")
    if peak is not None:
        return peak
    # not the first choice, since it also counts the program that started this one
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_status(name: str, path: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of a line of /proc/self/status; None where a system or kernel leaves it out."""
    status = path.read_text() if path.exists() else ""
    found = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def gather_peaks(
    devices: Sequence[torch.device], *, group: dist.ProcessGroup | None = None
) -> list[int]:
    """The peaks of all ranks of the group, on each of them; without a group of this one alone.

    Args:
        devices: of this process, as many as of the others.
    """
    own = torch.tensor([peak_memory(device) for device in devices], dtype=torch.int64)
    if not dist.is_initialized():
        return own.tolist()
    peaks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peaks, own, group=group)
    return torch.cat(peaks).tolist()


class MemoryAccount:
    """Describes what fills the memory of this rank, for the report of a run that has none left.

    Args:
        devices: where this process computes.
        remedies: what the options of the run leave to change, the best first.
        answering: the same while its model answers.

    Attributes:
        train_step: set it once it is there; before that only remedies are told.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        remedies: Sequence[str],
        answering: Sequence[str] = (),
    ) -> None:
        self.devices = devices
        self.remedies, self.answering = list(remedies), list(answering)
        self.train_step: TrainStep | None = None

    def describe(self) -> str:
        """One or two sentences: shape of the micro-batch, what is in use and by what, remedies."""
        answers = progress.place().operation == "decoding"
        remedies = self.answering if answers else self.remedies
        helps = f"What helps: {'; '.join(remedies[:3])}." if remedies else ""
        return " ".join(filter(None, [_describe_micro_batch(), self._describe_use(), helps]))

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
        fullest, used, of = self.devices[0], read_status("VmRSS"), ""
        if is_accelerator(fullest):
            module = torch.get_device_module(fullest)
            free, fullest = min((module.mem_get_info(one)[0], one) for one in self.devices)
            total = module.mem_get_info(fullest)[1]
            used, of = total - free, f" of {_gib(total)} on {fullest}"
        parts = self.parts()
        if not parts or used is None:
            return ""
        parts["activations and the rest"] = max(0, used - sum(parts.values()))
        listed = ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())
        return f"In use: {_gib(used)}{of} ({listed}; the peak was {_gib(peak_memory(fullest))})."


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
