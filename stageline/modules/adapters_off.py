"""A model as it was before its adapters were trained: the outermost one of each layer set aside.

The layer below stands in the adapter's place, so what runs is the very code and weights of the
model without it. Adapters below the outermost stay: they belong to the model that training began
with.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stageline.modules.lora import LoRAWrapper

Place = tuple[nn.Module, str, LoRAWrapper]  # parent, name in it, what stands there


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """While open, the outermost adapter of every layer has no part in the passes."""
    places = [place for model in models for place in _outermost(model)]
    try:
        for parent, leaf, wrapper in places:
            parent._modules[leaf] = wrapper.lora_module
        yield
    finally:
        for parent, leaf, wrapper in places:
            parent._modules[leaf] = wrapper


def trained_besides(model: nn.Module) -> list[str]:
    """Names of what is trained and would still be there with adapters off."""
    inside = {
        id(parameter)
        for _, _, wrapper in _outermost(model)
        for name, parameter in wrapper.named_parameters()
        if not name.startswith("lora_module.")
    }
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad and id(p) not in inside]


def begun_adapters(model: nn.Module) -> list[str]:
    """Names of outermost adapters that add something already: the start is not the layer alone."""
    found = []
    for name, parameter in model.named_parameters():
        is_outermost = ".lora.lora_B." in f".{name}" and "lora_module." not in name
        if not is_outermost or parameter.is_meta:
            continue
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if bool(torch.any(own != 0)):
            found.append(name)
    return found


def _outermost(model: nn.Module) -> list[Place]:
    return [
        (parent, leaf, child)
        for parent in list(model.modules())
        if not isinstance(parent, LoRAWrapper)
        for leaf, child in parent._modules.items()
        if isinstance(child, LoRAWrapper)
    ]
