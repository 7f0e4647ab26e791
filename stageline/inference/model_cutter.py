"""Cuts a transformers model over the devices of one machine: a device_map for inference.

Only the layers of the language model are split, and a tower that is too large. The last layer lies
with the first: embeddings and head are there as well, so hidden states come back instead of logits,
and a tied head finds its weight. Bytes decide, or the number of layers where the user says what the
tower takes. Loads nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from stageline.errors import UserError
from stageline.inference.meta_model import blocks_path, layers_path, model_on_meta
from stageline.inference.model_bytes import ModelBytes, measure_model
from stageline.inference.pass_bytes import Load
from stageline.inference.placement import DeviceBytes, Homes, device_bytes, place


def layer_counts(num_layers: int, num_devices: int, *, visual_gpu_ratio: float = 0.0) -> list[int]:
    """Layers per device; device 0 has the first layers and the last one.

    Args:
        visual_gpu_ratio: the part of device 0 that the vision tower takes, in shares of what a
            device has. From 1 on device 0 has only the layers that it must have. The tower is not
            cut: whether it fits there is not known here.

    Returns:
        Counts that sum to `num_layers`; at most one apart on devices 1 and above. Fewer devices
        than asked for where there are too few layers: device 0 needs two.
    """
    if num_devices < 1 or num_layers < 1:
        raise UserError(
            f"{num_layers} layers on {num_devices} devices: at least one of each was expected; "
            "set --num-devices to 1 or more."
        )
    if visual_gpu_ratio < 0:
        raise UserError(
            f"visual_gpu_ratio {visual_gpu_ratio} is negative: it is the share of device 0 that "
            "the vision tower takes; pass 0 for a language model."
        )
    num_devices = min(num_devices, max(1, num_layers - 1))
    if num_devices == 1:
        return [num_layers]
    free = max(0.0, 1.0 - visual_gpu_ratio)
    others = num_devices - 1
    first = round(num_layers * free / (free + others))
    first = min(max(first, 2), num_layers - others)
    rest, extra = divmod(num_layers - first, others)
    return [first] + [rest + (device < extra) for device in range(others)]


def layer_devices(num_layers: int, num_devices: int, *, visual_gpu_ratio: float = 0.0) -> list[int]:
    """The device of each layer."""
    counts = layer_counts(num_layers, num_devices, visual_gpu_ratio=visual_gpu_ratio)
    if len(counts) == 1:
        return [0] * num_layers
    devices = [0] * (counts[0] - 1)
    for device, count in enumerate(counts[1:], start=1):
        devices += [device] * count
    return [*devices, 0]


@dataclass(frozen=True)
class Wanted:
    """What a run says of its devices.

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
        visual_gpu_ratio: see `layer_counts`; None: bytes decide.
        memory: bytes that are free on each device; None: all have the same.
        load: what the model will be asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_devices: int,
        visual_gpu_ratio: float | None = None,
        memory: Sequence[int] | None = None,
        load: Load | None = None,
    ) -> None:
        if memory is not None and len(memory) != num_devices:
            raise UserError(
                f"{len(memory)} sizes of memory came for {num_devices} devices: one of each was "
                "expected, because layers are dealt out by them. Give one for each device."
            )
        self.model = model
        self.num_devices = num_devices
        self.visual_gpu_ratio = visual_gpu_ratio
        self.memory = memory
        self.load = load or Load()

    def device_map(self) -> dict[str, int]:
        """Module path -> device; every parameter and buffer lies below exactly one path."""
        placed: dict[str, int] = {}
        homes = self.homes
        lists = {self.layers_path(): homes.layers}
        if any(homes.blocks):
            lists[blocks_path(self.model)] = homes.blocks
        self._place("", lists, placed)
        check_cover(self.model, placed)
        return placed

    def layer_devices(self) -> list[int]:
        """The device of each layer."""
        return list(self.homes.layers)

    @cached_property
    def homes(self) -> Homes:
        """The device of each layer, and of each block of a tower that had to be cut."""
        if self.visual_gpu_ratio is None and self.num_devices > 1:
            memory = self.memory or [1] * self.num_devices
            return place(self.bytes, memory, may_cut_tower=self.memory is not None)
        path = self.layers_path()
        devices = layer_devices(
            len(self.model.get_submodule(path)),
            self.num_devices,
            visual_gpu_ratio=self.visual_gpu_ratio or 0.0,
        )
        tower = blocks_path(self.model)
        num_blocks = len(self.model.get_submodule(tower)) if tower else 0
        return Homes(tuple(devices), (0,) * num_blocks)

    def devices(self) -> list[DeviceBytes]:
        """What will lie on each device."""
        return device_bytes(self.bytes, self.homes, self.memory or [0] * self.num_devices)

    @cached_property
    def bytes(self) -> ModelBytes:
        """What each part of the model needs; measured once."""
        model = self.model
        if any(not parameter.is_meta for parameter in model.parameters()):
            model = model_on_meta(model.config, dtype=model.dtype)
        return measure_model(model, self.load)

    def layers_path(self) -> str:
        """Where the list of decoder layers lies; raises where there is not exactly one."""
        return layers_path(self.model)

    def _place(self, path: str, lists: Mapping[str, Sequence[int]], placed: dict[str, int]) -> None:
        """Descends only where lists are below; everything beside them goes to device 0."""
        module = self.model.get_submodule(path)
        prefix = f"{path}." if path else ""
        if path in lists:
            placed.update({f"{prefix}{index}": home for index, home in enumerate(lists[path])})
            return
        own = [*module._parameters, *module._buffers]
        placed.update({f"{prefix}{name}": 0 for name in own})
        for name, inner in module.named_children():
            child = f"{prefix}{name}"
            # a list is never called itself, so what moves inputs belongs to its members
            is_list = isinstance(inner, nn.ModuleList) and not [*inner._parameters]
            if is_list or any(f"{one}.".startswith(f"{child}.") for one in lists):
                self._place(child, lists, placed)
            else:
                placed[child] = 0


def check_cover(model: nn.Module, device_map: dict[str, int]) -> None:
    """Asserts that a device_map names only what exists and covers each tensor exactly once."""
    paths = {name for name, _ in model.named_modules()}
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    phantoms = [key for key in device_map if key not in paths and key not in tensors]
    assert not phantoms, f"the device_map names modules that do not exist: {phantoms}"
    for tensor in tensors:
        owners = [key for key in device_map if tensor == key or tensor.startswith(key + ".")]
        assert len(owners) == 1, f"{tensor} is covered by {owners}"
