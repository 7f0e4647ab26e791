"""A layer with other tensors in it: the same modules by all they do, but not their weights.

The layer itself stays on the host. A shell shares hooks, settings and plain attributes with it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def shell_of(layer: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A twin of the module tree that computes with `tensors`.

    Args:
        tensors: for the id of each parameter and buffer, so that one with two names stays one;
            those that are not in it stay those of the layer.
    """
    return _twin(layer, tensors, {})


def _twin(module: nn.Module, tensors: Mapping[int, torch.Tensor], made: dict[int, Any]) -> Any:
    if id(module) in made:  # a module that stands in two places stays one
        return made[id(module)]
    twin = made[id(module)] = module.__class__.__new__(module.__class__)
    own = dict(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: tensors.get(id(value), value) for name, value in own[kind].items()}
    own["_modules"] = {
        name: None if child is None else _twin(child, tensors, made)
        for name, child in own["_modules"].items()
    }
    if "_flat_weights_names" in own:  # recurrent layers keep a list of their weights
        names = own["_flat_weights_names"]
        own["_flat_weights"] = [own["_parameters"].get(name) for name in names]
    twin.__dict__.update(own)
    return twin
