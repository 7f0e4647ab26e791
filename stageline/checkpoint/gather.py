"""Puts the weights of sharded stages together on the host, for as long as they are saved."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Place = tuple[nn.Module, str]  # a module and the name of its parameter


@contextmanager
def gathered(stages: Iterable[nn.Module], *, keep: bool) -> Iterator[None]:
    """While open, sharded parameters are whole tensors on the host; every replica calls this.

    They come in the type that the model computes in. Module by module is put together on the
    device, so at no time is more of a stage there than one of them.

    Args:
        keep: whether this replica wants them; else its stages stay as they are.
    """
    modules = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.reshard()  # an evaluation may have left them whole
    before: dict[Place, nn.Parameter] = {}
    copies: dict[Place, nn.Parameter] = {}
    for module in modules:
        sharded = _sharded(module)
        module.unshard()
        if keep:
            before.update(sharded)
            copies.update(_copies(sharded))
        module.reshard()
    try:
        _put(copies)
        yield
    finally:
        _put({place: before[place] for place in copies})


def _sharded(module: nn.Module) -> dict[Place, nn.Parameter]:
    return {
        (child, name): parameter
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if isinstance(parameter, DTensor)
    }


@torch.no_grad()
def _copies(sharded: dict[Place, nn.Parameter]) -> dict[Place, nn.Parameter]:
    """Copies of what is whole now; a weight of two modules stays one."""
    made: dict[int, nn.Parameter] = {}
    copies = {}
    for (module, name), share in sharded.items():
        whole = module._parameters[name]
        if whole is None or isinstance(whole, DTensor):
            continue  # its module's turn comes
        if id(whole) not in made:
            copy = whole.detach().to("cpu", copy=True)
            made[id(whole)] = nn.Parameter(copy, requires_grad=share.requires_grad)
        copies[module, name] = made[id(whole)]
    return copies


def _put(parameters: dict[Place, nn.Parameter]) -> None:
    for (module, name), parameter in parameters.items():
        module._parameters[name] = parameter
