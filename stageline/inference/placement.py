"""Which layers lie on which device: the fullest device is to be as empty as can be.

Pure numbers. The rule of this house is kept: embeddings, head, tower, the first and the last layer
lie on device 0; of the others each device has a run of neighbours.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.errors import UserError
from stageline.inference.model_bytes import ModelBytes
from stageline.pipeline.partition_dp import smallest_maximum

GIB = 1024**3
HEADROOM = 0.05  # of a device: the allocator's gaps, the context of the libraries


@dataclass(frozen=True)
class DeviceBytes:
    """What lies on one device.

    Attributes:
        layers: their indices.
        weights: of layers and ends; the tower's are in `vision`.
        workspace: the fullest moment beside the lasting bytes.
        memory: bytes that may be used; 0: not known.
    """

    layers: tuple[int, ...]
    weights: int
    cache: int
    vision: int
    workspace: int
    memory: int = 0

    @property
    def total(self) -> int:
        """At the fullest moment."""
        return self.weights + self.cache + self.vision + self.workspace

    @property
    def fraction(self) -> float:
        """Of its memory."""
        return self.total / self.memory if self.memory else 0.0


def place_layers(model: ModelBytes, memory: Sequence[int]) -> list[int]:
    """The device of each layer, such that the largest used fraction is as small as can be.

    Args:
        memory: bytes of each device; only their ratios count here. Whether the model fits is
            another question: see `check_fit`.

    Returns:
        No device is left empty as long as there are more layers than devices.
    """
    if not memory or min(memory) <= 0:
        raise UserError(
            f"the memory of the devices came as {list(memory)}: a number above 0 for each was "
            "expected, because layers are dealt out by it. Use devices that have some left."
        )
    num_layers = len(model.layers)
    num_devices = min(len(memory), max(1, num_layers - 1))
    if num_devices == 1:
        return [0] * num_layers
    known = _Ranges(model)

    def fraction(device: int, start: int, end: int) -> float:
        return known.total(start, end, is_first=device == 0) / memory[device]

    counts = smallest_maximum(num_layers - 1, num_devices, fraction)
    assert counts is not None, "fractions are finite"
    runs = ([device] * count for device, count in enumerate(counts))
    return [*itertools.chain(*runs), 0]


class _Ranges:
    """The bytes of neighbouring layers, without adding them up anew each time."""

    def __init__(self, model: ModelBytes) -> None:
        self.model = model
        lasting = (layer.weights + layer.cache + layer.beyond for layer in model.layers)
        self.sums = [0, *itertools.accumulate(lasting)]
        self.peaks: dict[tuple[int, int], int] = {}
        for start in range(len(model.layers)):
            peak = 0
            for end in range(start + 1, len(model.layers) + 1):
                peak = max(peak, model.layers[end - 1].workspace)
                self.peaks[start, end] = peak

    def total(self, start: int, end: int, *, is_first: bool) -> int:
        total, peak = self.sums[end] - self.sums[start], self.peaks[start, end]
        if not is_first:
            return total + peak
        last = self.model.layers[-1]
        total += last.weights + last.cache + last.beyond + self.model.ends + self.model.vision
        return total + max(
            peak, last.workspace, self.model.vision_workspace, self.model.end_workspace
        )


def device_bytes(
    model: ModelBytes, devices: Sequence[int], memory: Sequence[int]
) -> list[DeviceBytes]:
    """What lies where, by the device of each layer; also for maps that were made otherwise."""
    found = []
    for device, limit in enumerate(memory):
        indices = tuple(index for index, own in enumerate(devices) if own == device)
        layers = [model.layers[index] for index in indices]
        peaks = [layer.workspace for layer in layers]
        if device == 0:
            peaks += [model.vision_workspace, model.end_workspace]
        found.append(
            DeviceBytes(
                layers=indices,
                weights=sum(layer.weights for layer in layers) + (device == 0) * model.ends,
                cache=sum(layer.cache for layer in layers),
                vision=model.vision if device == 0 else 0,
                workspace=max(peaks, default=0) + sum(layer.beyond for layer in layers),
                memory=limit,
            )
        )
    return found


def check_fit(found: Sequence[DeviceBytes], *, asked: str) -> None:
    """Refuses a placement that does not fit.

    Args:
        asked: the load, for people.

    Raises:
        UserError: with the table, what is missing, and what would help.
    """
    _check(found, [item.total for item in found], asked)


def check_weights_fit(found: Sequence[DeviceBytes], *, asked: str) -> None:
    """Refuses a placement whose weights alone do not fit; raises as `check_fit` does."""
    _check(found, [item.weights + item.vision for item in found], asked)


def _check(found: Sequence[DeviceBytes], needed: Sequence[int], asked: str) -> None:
    over = [
        (device, need - int(item.memory * (1 - HEADROOM)))
        for device, (item, need) in enumerate(zip(found, needed, strict=True))
        if need > item.memory * (1 - HEADROOM)
    ]
    if not over:
        return
    lacking = ", ".join(f"{_gib(size)} GiB on device {device}" for device, size in over)
    raise UserError(
        f"{len(found)} device{'s' if len(found) > 1 else ''} came for a model that needs more: "
        f"{lacking} is missing. At most {1 - HEADROOM:.0%} of each was expected to be used for "
        f"{asked}, because the allocator needs the rest:\n{format_table(found)}\n"
        f"{_advice(found, over)}"
    )


def _advice(found: Sequence[DeviceBytes], over: Sequence[tuple[int, int]]) -> str:
    device, lacking = over[0]
    worst = found[device]
    helpful = []
    if any(item.total < item.memory * (1 - HEADROOM) for item in found) or len(worst.layers) > 2:
        helpful.append("more or larger devices (--num-devices)")
    if worst.cache + worst.workspace > lacking:
        helpful.append("fewer rows (--batch-size) or a shorter --plan-length")
    if worst.vision and worst.workspace > lacking:
        helpful.append("fewer --plan-images")
    helpful.append("a quantised base (--builder.quantization nf4)")
    return f"What helps: {', '.join(helpful)}."


def format_table(found: Sequence[DeviceBytes]) -> str:
    """A row a device, in GiB."""
    head = ("device", "layers", "weights", "cache", "vision", "workspace", "sum", "free", "used")
    rows = [head]
    for device, item in enumerate(found):
        sizes = (item.weights, item.cache, item.vision, item.workspace, item.total, item.memory)
        cells = [_gib(size) for size in sizes]
        rows.append((str(device), _runs(item.layers), *cells, f"{item.fraction:.1%}"))
    totals = [sum(getattr(item, name) for item in found) for name in ("weights", "cache", "vision")]
    count = sum(len(item.layers) for item in found)
    rows.append(("all", str(count), *map(_gib, totals), "", *_ends(found)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _ends(found: Sequence[DeviceBytes]) -> tuple[str, str, str]:
    total, memory = (sum(getattr(item, name) for item in found) for name in ("total", "memory"))
    return _gib(total), _gib(memory), f"{max(item.fraction for item in found):.1%}"


def _runs(layers: Sequence[int]) -> str:
    """0-6,27"""
    runs: list[list[int]] = []
    for index in layers:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
