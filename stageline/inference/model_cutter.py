"""Cuts a transformers model over the devices of one machine: a device_map for inference.

Only the layers of the language model are split, and a tower that is too large. The last layer is
on the device of the first: embeddings and head are there as well, so hidden states come back
instead of logits, and a tied head finds its weight. Each device has a run of neighbours of the
other layers, such that the fullest device is as empty as can be; or, where the user says what the
tower takes, the number of layers decides. Loads nothing.

Accelerate's maps are not a base for it: they put the last layer on the last device and know weights
only (both are compared in benchmarks/model_cutter_2026-11-22.md).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from stageline import tables
from stageline.errors import UserError
from stageline.pipeline.topology import uniform_partition
from stageline.planner.estimate import (
    Cost,
    Load,
    ModelBytes,
    ModelCosts,
    blocks_path,
    layers_path,
    measure_model,
    model_on_meta,
    module_list,
)
from stageline.planner.partition import smallest_maximum

GIB = 1024**3
HEADROOM = 0.05  # share of a device for the allocator's gaps and the context of CUDA libraries


@dataclass(frozen=True)
class DeviceBytes:
    """The layers and bytes of one device.

    Attributes:
        layers: their indices.
        vision: of the weights, those of the tower.
        memory: bytes that may be used; 0: not known.
    """

    layers: tuple[int, ...]
    cost: Cost
    vision: int
    memory: int = 0

    @property
    def workspace(self) -> int:
        """Bytes at the fullest moment, without weights and complete caches."""
        return self.cost.answering + self.cost.beyond

    @property
    def fraction(self) -> float:
        """Share of the device's memory in use at the fullest moment."""
        return self.cost.while_answering / self.memory if self.memory else 0.0


@dataclass(frozen=True)
class Homes:
    """The device of each layer, and of each block of the tower."""

    layers: tuple[int, ...]
    blocks: tuple[int, ...] = ()


def place(model: ModelBytes, memory: Sequence[int], *, may_cut_tower: bool = True) -> Homes:
    """Place layers such that the largest used fraction is as small as can be.

    No device is left empty as long as there are more layers than devices. The tower is cut, by its
    blocks, only where it does not fit on device 0 as a whole.

    Args:
        memory: bytes of each device. Whether the model fits is another question: see `check_fit`.
        may_cut_tower: False where memory is not known, or a tower's blocks must stay together.
    """
    if min(memory) <= 0:
        raise UserError(
            f"The free memory of the devices is {list(memory)} bytes; layers are placed by numbers "
            "above 0. Use devices that have some left."
        )
    num_layers, num_blocks = len(model.layers), len(model.blocks)
    whole = _deal(model, memory[: max(1, num_layers - 1)])
    can_cut = num_blocks and num_layers > 1 and 1 < len(memory) <= num_blocks + num_layers - 2

    def fullest(homes: Homes) -> float:
        return max(item.fraction for item in device_bytes(model, homes, memory))

    if not (may_cut_tower and can_cut) or fullest(whole) <= 1 - HEADROOM:
        return whole
    return min(whole, _deal(model, memory, cuts_tower=True), key=fullest)


def _deal(model: ModelBytes, memory: Sequence[int], *, cuts_tower: bool = False) -> Homes:
    """Deal out runs of neighbours, at least one layer or block a device; exact.

    The last layer is on device 0; where the tower is cut, its blocks lead the run and the first
    layer is on device 0 as well.
    """
    num_blocks, num_layers = len(model.blocks), len(model.layers)
    if len(memory) == 1:
        return Homes((0,) * num_layers, (0,) * num_blocks)
    blocks = model.blocks if cuts_tower else ()
    front = model.layers[:1] if cuts_tower else ()
    rest = replace(model.tower, weights=model.tower.weights - sum(blocks))
    chain = ModelCosts(
        overhead=Cost(),
        first=sum((*front, model.layers[-1], rest), model.ends),
        layers=(*(replace(model.tower, weights=w) for w in blocks), *model.layers[len(front) : -1]),
        last=Cost(),
    )

    def fraction(device: int, start: int, end: int) -> float:
        return chain.stage(start, end).while_answering / memory[device]

    counts = smallest_maximum(chain.num_layers, len(memory), fraction)
    assert counts is not None, "fractions are finite"
    runs = [device for device, count in enumerate(counts) for _ in range(count)]
    layers = (*(0 for _ in front), *runs[len(blocks) :], 0)
    return Homes(layers, tuple(runs[: len(blocks)]) or (0,) * num_blocks)


def device_bytes(model: ModelBytes, homes: Homes, memory: Sequence[int]) -> list[DeviceBytes]:
    """Return the layers and bytes of each device; also for maps that were made otherwise."""
    found = []
    for device, limit in enumerate(memory):
        indices = tuple(index for index, own in enumerate(homes.layers) if own == device)
        tower = zip(model.blocks, homes.blocks, strict=True)
        blocks = [size for size, own in tower if own == device]
        vision, cost = sum(blocks), Cost()
        if device == 0:
            vision, cost = vision + model.tower.weights - sum(model.blocks), model.ends
        if blocks or device == 0:
            cost += replace(model.tower, weights=vision)
        cost = sum((model.layers[index] for index in indices), cost)
        found.append(DeviceBytes(indices, cost, vision, limit))
    return found


def check_fit(found: Sequence[DeviceBytes], *, asked: str, without_passes: bool = False) -> None:
    """Refuse a placement that does not fit.

    Args:
        asked: the load, for people.

    Raises:
        UserError: with the table, what is missing, and what would help.
    """
    over = {}
    for device, item in enumerate(found):
        needed = item.cost.weights if without_passes else item.cost.while_answering
        if needed > item.memory * (1 - HEADROOM):
            over[device] = needed - int(item.memory * (1 - HEADROOM))
    if not over:
        return
    worst, lacking = found[min(over)], over[min(over)]
    helpful = ["a quantised base (`builder.quantization` nf4)"]
    if worst.vision and worst.workspace > lacking:
        helpful.insert(0, "fewer `plan_for.images`")
    if worst.cost.cache + worst.workspace > lacking:
        helpful.insert(0, "fewer rows (`batch_size`) or a shorter `plan_for.length`")
    if len(over) < len(found) or len(worst.layers) > 2:
        helpful.insert(0, "more or larger devices (`num_devices`)")
    missing = ", ".join(f"{_gib(size)} GiB on device {device}" for device, size in over.items())
    raise UserError(
        f"The model does not fit on {len(found)} device{'s' if len(found) > 1 else ''}: {missing} "
        f"is missing for {asked}, of which at most {1 - HEADROOM:.0%} of each may be used:\n"
        f"{format_table(found)}\nWhat helps: {', '.join(helpful)}."
    )


def format_table(found: Sequence[DeviceBytes]) -> str:
    """A row a device, in GiB."""
    head = ("device", "layers", "weights", "cache", "vision", "workspace", "sum", "free", "used")
    rows: list[tuple[str, ...]] = [head]
    columns = []
    for device, item in enumerate(found):
        cost = item.cost
        sizes = [cost.weights - item.vision, cost.cache, item.vision, item.workspace]
        sizes += [cost.while_answering, item.memory]
        columns.append(sizes)
        rows.append((str(device), _runs(item.layers), *map(_gib, sizes), f"{item.fraction:.1%}"))
    fullest = f"{max(item.fraction for item in found):.1%}"
    count = str(sum(len(item.layers) for item in found))
    sums = [_gib(sum(column)) for column in zip(*columns, strict=True)]
    rows.append(("all", count, *sums[:3], "", *sums[4:], fullest))
    return tables.format_table(rows, num_texts=0)


def _runs(layers: Sequence[int]) -> str:
    """0-6,27"""
    numbered = itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in numbered]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def layer_devices(num_layers: int, num_devices: int, *, visual_gpu_ratio: float = 0.0) -> list[int]:
    """Return the device of each layer; device 0 has the first layers and the last one.

    Devices 1 and above have at most one layer more than others of them. Fewer devices than asked
    for where there are too few layers: device 0 needs two.

    Args:
        visual_gpu_ratio: see `uniform_partition`. The tower is not cut.
    """
    num_devices = min(num_devices, max(1, num_layers - 1))
    counts = uniform_partition(num_layers, num_devices, visual_gpu_ratio=visual_gpu_ratio)
    if num_devices > 1 and counts[0] < 2:
        counts = [2, *uniform_partition(num_layers - 2, num_devices - 1)]
    devices = [device for device, count in enumerate(counts) for _ in range(count)]
    return [*devices[1:], 0]


@dataclass(frozen=True)
class Wanted:
    """The settings of a run for its devices.

    Attributes:
        memory: bytes that are free on each device; None: the devices are asked.
        load: what the model will be asked for at once.
    """

    memory: tuple[int, ...] | None = None
    load: Load = Load()


class ModelCutter:
    """Makes the device_map of a model.

    Args:
        model: a transformers model, on the meta device for instance.
        num_devices: how many devices there are.
        visual_gpu_ratio: see `layer_devices`; None: bytes decide.
        memory: bytes that are free on each device; None: all have the same.
        load: what the model will be asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_devices: int,
        visual_gpu_ratio: float | None = None,
        memory: Sequence[int] | None = None,
        load: Load | None = None,
    ) -> None:
        assert memory is None or len(memory) == num_devices, "a size for each device"
        self.model = model
        self.num_devices = num_devices
        self.visual_gpu_ratio = visual_gpu_ratio
        self.memory = memory
        self.load = load or Load()

    def device_map(self) -> dict[str, int]:
        """Return module path -> device; every parameter and buffer is below exactly one path."""
        placed: dict[str, int] = {}
        lists = {layers_path(self.model): self.homes.layers}
        tower = blocks_path(self.model)
        if tower is not None and any(self.homes.blocks):
            lists[tower] = self.homes.blocks
        self._place("", lists, placed)
        return placed

    @cached_property
    def homes(self) -> Homes:
        """The device of each layer, and of each block of a tower that had to be cut."""
        if self.visual_gpu_ratio is None and self.num_devices > 1:
            memory = self.memory or [1] * self.num_devices
            return place(self.bytes, memory, may_cut_tower=self.memory is not None)
        num_layers = len(module_list(self.model, layers_path(self.model)))
        ratio = self.visual_gpu_ratio or 0.0
        devices = layer_devices(num_layers, self.num_devices, visual_gpu_ratio=ratio)
        tower = blocks_path(self.model)
        return Homes(tuple(devices), (0,) * (len(module_list(self.model, tower)) if tower else 0))

    def devices(self) -> list[DeviceBytes]:
        """Return the layers and bytes of each device."""
        return device_bytes(self.bytes, self.homes, self.memory or [0] * self.num_devices)

    @cached_property
    def bytes(self) -> ModelBytes:
        """The bytes of each part of the model; measured once."""
        model = self.model
        if any(not parameter.is_meta for parameter in model.parameters()):
            model = model_on_meta(model.config, dtype=model.dtype)
        return measure_model(model, self.load)

    def _place(self, path: str, lists: Mapping[str, Sequence[int]], placed: dict[str, int]) -> None:
        """Descend only where lists are below; everything else goes to device 0."""
        module = self.model.get_submodule(path)
        prefix = f"{path}." if path else ""
        if path in lists:
            placed.update({f"{prefix}{index}": home for index, home in enumerate(lists[path])})
            return
        placed.update({f"{prefix}{name}": 0 for name in [*module._parameters, *module._buffers]})
        for name, inner in module.named_children():
            child = f"{prefix}{name}"
            # a list is never called itself, so what moves inputs belongs to its members
            is_list = isinstance(inner, nn.ModuleList) and not [*inner._parameters]
            if is_list or any(f"{one}.".startswith(f"{child}.") for one in lists):
                self._place(child, lists, placed)
            else:
                placed[child] = 0
