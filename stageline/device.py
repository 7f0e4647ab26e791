"""Choose the device of a process, and the torch module of its kind: cuda, xpu, npu, any other.

Streams, events, generators and memory are in the module of a kind (`torch.get_device_module`):
torch.cuda, torch.xpu and torch_npu's torch.npu have one interface.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stageline.errors import UserError

# variables that limit the visible devices; read when the first device is used
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
VISIBLE |= {"npu": "ASCEND_RT_VISIBLE_DEVICES"}

FUSED = {"cpu", "cuda", "xpu"}  # torch itself has fused optimizers for them; a package may not


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device works in streams, on memory of its own; MPS does not."""
    return device.type not in ("cpu", "meta", "mps")


def accelerators(asked: str = "auto") -> list[torch.device]:
    """Return the accelerators that a run may use, without CUDA's driver; empty: it uses the CPU.

    Args:
        asked: "cpu", a kind of accelerator, or "auto": any kind but MPS, which must be named.
    """
    current = torch.accelerator.current_accelerator()
    kind = "cpu" if current is None else current.type
    if asked == "cpu" or (asked == "auto" and kind in ("cpu", "mps")):
        return []
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    if asked != "auto" and (kind != asked or not count):
        there = f"{count} x {kind}" if count else "no accelerator"
        raise UserError(
            f"`device` {asked}: torch {torch.__version__} finds {there}. Install the torch build "
            f"for it, check {VISIBLE.get(asked, 'its driver')}, or use `device` auto or cpu."
        )
    return [torch.device(kind, index) for index in range(count)]


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return torch's global generators of the host and then of these devices."""
    found = [torch.default_generator]
    for device in filter(is_accelerator, devices):
        module = torch.get_device_module(device)
        module.init()  # makes them
        index = module.current_device() if device.index is None else device.index
        found.append(module.default_generators[index])
    return found


@contextmanager
def generators_kept(devices: Iterable[torch.device]) -> Iterator[list[torch.Generator]]:
    """Yield the generators of the host and these devices; restore their states afterwards."""
    generators = generators_of(devices)
    states = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def synchronize(device: torch.device) -> None:
    """Wait for all work of an accelerator; other devices have none."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def device_in_use() -> torch.device | None:
    """Return the accelerator of this thread; None if the process has used none so far."""
    kind = torch.accelerator.current_accelerator()
    is_used = kind is not None and is_accelerator(kind)
    if kind is None or not (is_used and torch.get_device_module(kind).is_initialized()):
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values of the host on a device, without waiting for the copy."""
    return (values.pin_memory() if is_accelerator(device) else values).to(device, non_blocking=True)


def sleeping_event(device: torch.device) -> Any:
    """Return an event whose `synchronize` lets the thread sleep, if the device has such."""
    module = torch.get_device_module(device)
    return module.Event() if device.type == "xpu" else module.Event(blocking=True)


def empty_cache() -> None:
    """Release memory that torch's allocator holds unused."""
    for device in accelerators()[:1]:
        torch.get_device_module(device).empty_cache()


def available_memory() -> int | None:
    """Return the bytes still free on the host, or in the container; None: unknown."""
    found, folder = [], Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        values = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        found += [int(values[1]) * 1024] if values else []
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        # cached pages of files are freed when memory is needed
        cached = re.search(r"inactive_file (\d+)", (folder / "memory.stat").read_text())
        found.append(limit - used + (int(cached[1]) if cached else 0))
    return min(found, default=None)
