"""Which layers lie on which device: the fullest device is to be as empty as can be.

Pure numbers. The rule of this house is kept: embeddings, head, tower, the first and the last layer
lie on device 0; of the others each device has a run of neighbours. A tower that is too large for
device 0 is cut as well: its blocks, then the layers, are one run over the devices.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.errors import UserError
from stageline.inference.model_bytes import LayerBytes, ModelBytes
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


@dataclass(frozen=True)
class Homes:
    """The device of each layer, and of each block of the tower."""

    layers: tuple[int, ...]
    blocks: tuple[int, ...] = ()


def place(model: ModelBytes, memory: Sequence[int], *, may_cut_tower: bool = True) -> Homes:
    """Such that the largest used fraction is as small as can be.

    No device is left empty as long as there are more layers than devices. The tower is cut, by its
    blocks, only where it does not fit on device 0 as a whole.

    Args:
        memory: bytes of each device. Whether the model fits is another question: see `check_fit`.
        may_cut_tower: False where memory is not known, or a tower's blocks must stay together.
    """
    if not memory or min(memory) <= 0:
        raise UserError(
            f"the memory of the devices came as {list(memory)}: a number above 0 for each was "
            "expected, because layers are dealt out by it. Use devices that have some left."
        )
    whole = Homes(_place_layers(model, memory), (0,) * len(model.blocks))
    if not may_cut_tower or _fullest(model, whole, memory) <= 1 - HEADROOM:
        return whole
    cut = _place_blocks(model, memory)
    return min((whole, *cut), key=lambda homes: _fullest(model, homes, memory))


def _place_layers(model: ModelBytes, memory: Sequence[int]) -> tuple[int, ...]:
    """Layers alone; all else on device 0."""
    num_layers = len(model.layers)
    num_devices = min(len(memory), max(1, num_layers - 1))
    if num_devices == 1:
        return (0,) * num_layers
    runs = _runs_of(
        model.layers[:-1], memory[:num_devices], _fixed(model, model.layers[-1:], model.vision)
    )
    return (*runs, 0)


def _place_blocks(model: ModelBytes, memory: Sequence[int]) -> list[Homes]:
    """Blocks of the tower, and behind them all layers but the ends; none where there are few."""
    num_blocks = len(model.blocks)
    blocks = [LayerBytes(size, workspace=model.vision_workspace) for size in model.blocks]
    chain = [*blocks, *model.layers[1:-1]]
    if not num_blocks or len(model.layers) < 2 or not 1 < len(memory) <= len(chain):
        return []
    ends = (model.layers[0], model.layers[-1])
    runs = _runs_of(chain, memory, _fixed(model, ends, model.vision - sum(model.blocks)))
    return [Homes((0, *runs[num_blocks:], 0), tuple(runs[:num_blocks]))]


def _fixed(model: ModelBytes, layers: Sequence[LayerBytes], vision: int) -> tuple[int, int]:
    """Lasting bytes and fullest moment of what lies on device 0 in any case."""
    lasting = sum(layer.lasting for layer in layers) + model.ends + vision
    peaks = [layer.workspace for layer in layers]
    return lasting, max(*peaks, model.vision_workspace, model.end_workspace)


def _runs_of(
    items: Sequence[LayerBytes], memory: Sequence[int], fixed: tuple[int, int]
) -> list[int]:
    """The device of each item: runs of neighbours, at least one a device; exact."""
    sums = [0, *itertools.accumulate(item.lasting for item in items)]
    peaks = {}
    for start in range(len(items)):
        peak = 0
        for end in range(start + 1, len(items) + 1):
            peaks[start, end] = peak = max(peak, items[end - 1].workspace)

    def fraction(device: int, start: int, end: int) -> float:
        lasting, peak = sums[end] - sums[start], peaks[start, end]
        if device == 0:
            lasting, peak = lasting + fixed[0], max(peak, fixed[1])
        return (lasting + peak) / memory[device]

    counts = smallest_maximum(len(items), len(memory), fraction)
    assert counts is not None, "fractions are finite"
    return [device for device, count in enumerate(counts) for _ in range(count)]


def _fullest(model: ModelBytes, homes: Homes, memory: Sequence[int]) -> float:
    return max(item.fraction for item in device_bytes(model, homes, memory))


def device_bytes(model: ModelBytes, homes: Homes, memory: Sequence[int]) -> list[DeviceBytes]:
    """What lies where; also for maps that were made otherwise."""
    found = []
    for device, limit in enumerate(memory):
        indices = tuple(index for index, own in enumerate(homes.layers) if own == device)
        layers = [model.layers[index] for index in indices]
        tower = zip(model.blocks, homes.blocks, strict=True)
        blocks = [size for size, own in tower if own == device]
        peaks = [layer.workspace for layer in layers]
        peaks += [model.vision_workspace] if blocks else []
        if device == 0:
            peaks += [model.vision_workspace, model.end_workspace]
        beside = model.vision - sum(model.blocks) if device == 0 else 0
        found.append(
            DeviceBytes(
                layers=indices,
                weights=sum(layer.weights for layer in layers) + (device == 0) * model.ends,
                cache=sum(layer.cache for layer in layers),
                vision=sum(blocks) + beside,
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
