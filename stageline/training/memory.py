"""Memory of this process, of its GPU or the host: its peak, and its contents when it is full."""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from stageline import progress
from stageline.device import is_accelerator
from stageline.training.step import TrainStep, current_shapes


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that torch held on the device, or the peak resident set size."""
    if is_accelerator(device):
        return torch.get_device_module(device).max_memory_allocated(device)
    # the second is not the first choice, since it also counts the program that started this one
    return read_status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_status(name: str, path: Path = Path("/proc/self/status")) -> int | None:
    """Return the bytes of a line of /proc/self/status; None where there is no such line."""
    status = path.read_text() if path.exists() else ""
    found = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def gather_peaks(
    devices: Sequence[torch.device], *, group: dist.ProcessGroup | None = None
) -> list[int]:
    """Return the peaks of all ranks of the group, or without one of this process."""
    own = torch.tensor([peak_memory(device) for device in devices], dtype=torch.int64)
    if not dist.is_initialized():
        return own.tolist()
    peaks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peaks, own, group=group)
    return torch.cat(peaks).tolist()


@dataclass(eq=False)
class MemoryAccount:
    """Account of the memory of this rank, for the report of a run that has none left.

    Args:
        remedies, answering: changes that the options still allow, the best first, and those while
            the model generates.

    Attributes:
        train_step: set when it is there; before that only remedies are reported.
    """

    devices: Sequence[torch.device]
    remedies: Sequence[str]
    answering: Sequence[str] = ()
    train_step: TrainStep | None = field(default=None, init=False)

    def describe(self) -> str:
        """Return sentences with the shape of the micro-batch, what is in use, and remedies."""
        told, place, shapes = [], progress.place(), current_shapes
        if place.micro_batch is not None and place.micro_batch < len(shapes):
            told.append("It has {} x {} tokens.".format(*shapes[place.micro_batch]))
        fullest, used, of = self.devices[0], read_status("VmRSS"), ""
        if is_accelerator(fullest):
            module = torch.get_device_module(fullest)
            free, fullest = min((module.mem_get_info(one)[0], one) for one in self.devices)
            total = module.mem_get_info(fullest)[1]
            used, of = total - free, f" of {_gib(total)} on {fullest}"
        parts = self.parts()
        if parts and used is not None:
            parts["activations and the rest"] = max(0, used - sum(parts.values()))
            listed = ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())
            peak = _gib(peak_memory(fullest))
            told.append(f"In use: {_gib(used)}{of} ({listed}; the peak was {peak}).")
        if remedies := self.answering if place.operation == "decoding" else self.remedies:
            told.append(f"What helps: {'; '.join(remedies[:3])}.")
        return " ".join(told)

    def parts(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state, shared memory once."""
        step = self.train_step
        if step is None:
            return {}
        weights = [weight for stage in step.runner.local for weight in stage.parameters()]
        weights += step.weights.parameters.values()
        states = [] if step.optimizer is None else step.optimizer.state.values()
        held: dict[str, list[Any]] = {
            "weights": weights,
            "gradients": [weight.grad for weight in weights],
            "optimizer state": [value for state in states for value in state.values()],
        }
        found = {}
        for name, values in held.items():
            tensors = [one for one in values if isinstance(one, torch.Tensor)]
            local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
            found[name] = sum({one.data_ptr(): one.nbytes for one in local}.values())
        return found


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
