"""Run a model over emulated devices: tensors without values that know their device.

An operation on tensors of two devices raises, as it does on GPUs, and so do tensors that no hook
moves. No value is computed, so nothing that depends on values can be run: no tokens, and no tower
that reads sizes of images from tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# the only kind with indices that a torch for CPUs lets fake tensors have
KIND = "lazy"


def fake_accelerators(
    patch: pytest.MonkeyPatch, kind: str, count: int, **module: Callable[..., object]
) -> list[torch.device]:
    """Make torch report `count` accelerators; no tensor can be on them.

    Args:
        module: what the module of the kind, such as torch.cuda, answers instead.
    """
    found = torch.device(kind) if count else None
    patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: found)
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    for name, answer in module.items():
        patch.setattr(torch.get_device_module(kind), name, answer, raising=False)
    return [torch.device(kind, index) for index in range(count)]


class FakeDevices:
    """Fake devices `device(0)`, `device(1)` ...; enter with `fake_devices()`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def device(self, index: int) -> torch.device:
        return torch.device(KIND, index)

    def move(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return a fake copy of a true tensor."""
        return self.mode.from_tensor(tensor).to(self.device(index))

    def dispatch(self, model: nn.Module, device_map: dict[str, int]) -> None:
        """Places a model as a device_map says, with the hooks that accelerate has for GPUs."""
        model.requires_grad_(False)
        made: dict[int, torch.Tensor] = {}  # a tied weight stays one
        for path, module in model.named_modules():
            for store in (module._parameters, module._buffers):
                for leaf, tensor in store.items():
                    if tensor is None:
                        continue
                    name = f"{path}.{leaf}".lstrip(".")
                    index = _device_of(name, device_map)
                    if id(tensor) not in made:
                        made[id(tensor)] = _like(tensor, self.move(tensor, index))
                        made[id(made[id(tensor)])] = made[id(tensor)]
                    store[leaf] = made[id(tensor)]
        attach_align_device_hook_on_blocks(
            model,
            execution_device={path: self.device(index) for path, index in device_map.items()}
            | {"": self.device(0)},
            offload=dict.fromkeys(device_map, False),
            skip_keys=model._skip_keys_device_placement,
        )


@contextmanager
def fake_devices() -> Iterator[FakeDevices]:
    """In here all tensors are fake; build models and batches before."""

    def is_autocast_enabled(kind: str = "cuda") -> bool:
        return kind != KIND and known(kind)

    known = torch.is_autocast_enabled
    with (
        FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode,
        # older releases of transformers ask about each device, and torch does not know this one
        mock.patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
    ):
        yield FakeDevices(mode)


def _device_of(name: str, device_map: dict[str, int]) -> int:
    (index,) = [i for path, i in device_map.items() if name == path or name.startswith(f"{path}.")]
    return index


def _like(tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(fake, requires_grad=False) if is_parameter else fake
