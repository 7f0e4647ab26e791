"""Cuts a transformers model over the devices of one machine: a device_map for inference.

Only the layers of the language model are split. The last one lies with the first: embeddings and
head are there as well, so hidden states come back instead of logits, and a tied head finds its
weight. Loads nothing.
"""

from torch import nn

from stageline.errors import UserError


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


class ModelCutter:
    """Makes the device_map of a model.

    Args:
        model: a transformers model, on the meta device for instance.
        num_devices: how many devices there are.
        visual_gpu_ratio: see `layer_counts`.
    """

    def __init__(
        self, model: nn.Module, *, num_devices: int, visual_gpu_ratio: float = 0.0
    ) -> None:
        self.model = model
        self.num_devices = num_devices
        self.visual_gpu_ratio = visual_gpu_ratio

    def device_map(self) -> dict[str, int]:
        """Module path -> device; every parameter and buffer lies below exactly one path."""
        layers = self.layers_path()
        count = len(self.model.get_submodule(layers))
        devices = layer_devices(count, self.num_devices, visual_gpu_ratio=self.visual_gpu_ratio)
        placed: dict[str, int] = {}
        self._place("", layers, devices, placed)
        check_cover(self.model, placed)
        return placed

    def layers_path(self) -> str:
        """Where the list of decoder layers lies.

        Raises:
            UserError: there is not exactly one beside the token embeddings.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        text_model = names[id(self.model.get_input_embeddings())].rpartition(".")[0]
        wanted = self.model.config.get_text_config(decoder=True).num_hidden_layers
        found = [
            f"{text_model}.{name}".lstrip(".")
            for name, child in self.model.get_submodule(text_model).named_children()
            if isinstance(child, nn.ModuleList) and len(child) == wanted
        ]
        if len(found) != 1:
            raise UserError(
                f"{type(self.model).__name__} has {len(found)} lists of {wanted} layers beside "
                "its embeddings, one was expected: use --num-devices 1, or a builder part of your "
                "own that makes the device_map."
            )
        return found[0]

    def _place(self, path: str, layers: str, devices: list[int], placed: dict[str, int]) -> None:
        """Descends only where layers are below; everything beside them goes to device 0."""
        module = self.model.get_submodule(path)
        prefix = f"{path}." if path else ""
        if path == layers:
            placed.update({f"{prefix}{index}": device for index, device in enumerate(devices)})
            return
        own = [*module._parameters, *module._buffers]
        placed.update({f"{prefix}{name}": 0 for name in own})
        for name, _ in module.named_children():
            child = f"{prefix}{name}"
            if layers == child or layers.startswith(child + "."):
                self._place(child, layers, devices, placed)
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
