"""Cuts a transformers model over the devices of one machine: a device_map for inference.

Only the layers of the language model are split. The last layer is on the device of the first:
embeddings, tower and head are there as well, so hidden states come back instead of logits, and a
tied head finds its weight. Each device has a run of neighbours of the other layers, such that the
fullest device is as empty as can be; or, where the user says what the tower takes, the number of
layers decides. Loads nothing.

Accelerate's maps are not a base for it: they put the last layer on the last device and know weights
only (both are compared in benchmarks/model_cutter_2026-11-22.md).
"""

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline import tables
from stageline.errors import UserError
from stageline.pipeline.topology import uniform_partition
from stageline.planner.estimate import (
    Cost,
    Load,
    ModelBytes,
    ModelCosts,
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


def place(model: ModelBytes, memory: Sequence[int]) -> list[int]:
    """Return the device of each layer, such that the largest used fraction is as small as can be.

    No device is left empty as long as there are more layers than devices. The last layer is on
    device 0.

    Args:
        memory: bytes of each device. Whether the model fits is another question: see `check_fit`.
    """
    if min(memory) <= 0:
        raise UserError(
            f"The free memory of the devices is {list(memory)} bytes; layers are placed by numbers "
            "above 0. Use devices that have some left."
        )
    memory = memory[: max(1, len(model.layers) - 1)]
    if len(memory) == 1:
        return [0] * len(model.layers)
    chain = ModelCosts(
        overhead=Cost(),
        first=sum((model.layers[-1], model.tower), model.ends),
        layers=model.layers[:-1],
        last=Cost(),
    )

    def fraction(device: int, start: int, end: int) -> float:
        return chain.stage(start, end).while_answering / memory[device]

    counts = smallest_maximum(chain.num_layers, len(memory), fraction)
    assert counts is not None, "fractions are finite"
    return [*(device for device, count in enumerate(counts) for _ in range(count)), 0]


def device_bytes(
    model: ModelBytes, homes: Sequence[int], memory: Sequence[int]
) -> list[DeviceBytes]:
    """Return the layers and bytes of each device; also for maps that were made otherwise."""
    found = []
    for device, limit in enumerate(memory):
        indices = tuple(index for index, own in enumerate(homes) if own == device)
        cost = sum((model.layers[index] for index in indices), Cost())
        vision = 0
        if device == 0:
            cost, vision = model.ends + model.tower + cost, model.tower.weights
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


@dataclass(eq=False)
class ModelCutter:
    """Makes the device_map of a model.

    Args:
        model: a transformers model, on the meta device for instance.
        num_devices: how many devices there are.
        visual_gpu_ratio: see `layer_devices`; None: bytes decide.
        memory: bytes that are free on each device; None: all have the same.
        load: what the model will be asked for.
    """

    model: PreTrainedModel
    _: KW_ONLY
    num_devices: int
    visual_gpu_ratio: float | None = None
    memory: Sequence[int] | None = None
    load: Load = Load()

    def __post_init__(self) -> None:
        assert self.memory is None or len(self.memory) == self.num_devices, "a size for each device"

    def device_map(self) -> dict[str, int]:
        """Return module path -> device; every parameter and buffer is below exactly one path."""
        placed: dict[str, int] = {}
        self._place("", layers_path(self.model), placed)
        return placed

    @cached_property
    def homes(self) -> list[int]:
        """The device of each layer."""
        if self.visual_gpu_ratio is None and self.num_devices > 1:
            return place(self.bytes, self.memory or [1] * self.num_devices)
        num_layers = len(module_list(self.model, layers_path(self.model)))
        ratio = self.visual_gpu_ratio or 0.0
        return layer_devices(num_layers, self.num_devices, visual_gpu_ratio=ratio)

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

    def _place(self, path: str, layers: str, placed: dict[str, int]) -> None:
        """Descend only where the layers are below; everything else goes to device 0."""
        module = self.model.get_submodule(path)
        prefix = f"{path}." if path else ""
        if path == layers:
            placed.update({f"{prefix}{index}": home for index, home in enumerate(self.homes)})
            return
        placed.update({f"{prefix}{name}": 0 for name in [*module._parameters, *module._buffers]})
        for name, inner in module.named_children():
            child = f"{prefix}{name}"
            # a list is never called itself, so what moves inputs belongs to its members
            is_list = isinstance(inner, nn.ModuleList) and not [*inner._parameters]
            if is_list or f"{layers}.".startswith(f"{child}."):
                self._place(child, layers, placed)
            else:
                placed[child] = 0


def make_cutter(
    config: PretrainedConfig,
    *,
    memory: tuple[int, ...],
    visual_gpu_ratio: float | None,
    placement: Wanted,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    **options: Any,
) -> ModelCutter:
    """Return a cutter of the model on the meta device."""
    whole = model_on_meta(config, dtype=dtype, **options)
    if quantization:
        whole.config.quantization_config = quantization_settings(quantization)
    is_blind = getattr(config, "vision_config", None) is None
    return ModelCutter(
        whole,
        num_devices=len(memory),
        visual_gpu_ratio=visual_gpu_ratio,
        memory=memory,
        load=replace(placement.load, images=0) if is_blind else placement.load,
    )


def free_memory(devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Return the free bytes of each device, including memory that this process holds unused."""
    module = torch.get_device_module(devices[0])
    return tuple(
        module.mem_get_info(device)[0]
        + module.memory_reserved(device)
        - module.memory_allocated(device)
        for device in devices
    )


def quantization_settings(kind: str) -> dict[str, Any]:
    """Return the quantization entry of config.json, which suffices to count bytes."""
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True}
    return {"quant_method": "bitsandbytes", **bits}
