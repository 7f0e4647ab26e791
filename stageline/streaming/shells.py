"""A layer with other tensors in it: the same modules by all they do, but not their weights.

The layer itself stays on the host. A shell has its hooks and shares its settings and plain
attributes; a hook that is put on a shell, as transformers does to record outputs, ends with it.
"""

import functools
import types
from collections import OrderedDict
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
    twin.__dict__.update({name: _rebound(value, made) for name, value in own.items()})
    for name, value in own.items():
        if isinstance(value, nn.Module) and value._modules is module._modules:
            twin.__dict__[name] = _facade(value, twin)
    return twin


def _rebound(value: Any, made: Mapping[int, Any]) -> Any:
    """A method of a module (a wrapped `forward`, a hook) as that of its twin; others as they are.

    Of a module that stands above it, or is it.
    """
    if isinstance(value, types.MethodType) and id(value.__self__) in made:
        return types.MethodType(value.__func__, made[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = [_rebound(each, made) for each in value.args]
        keywords = {name: _rebound(each, made) for name, each in value.keywords.items()}
        return functools.partial(_rebound(value.func, made), *arguments, **keywords)
    if isinstance(value, OrderedDict):  # of hooks: those that a shell gets are its own
        return OrderedDict((key, _rebound(each, made)) for key, each in value.items())
    return value


def _facade(other: nn.Module, twin: nn.Module) -> nn.Module:
    """Another module over the same children: a stage model keeps the whole model it came from."""
    facade = other.__class__.__new__(other.__class__)
    shared = {name: twin.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
    facade.__dict__.update({**other.__dict__, **shared})
    return facade
