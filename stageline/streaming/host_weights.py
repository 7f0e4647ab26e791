"""Where weights live on the host: the values that passes read, those the optimizer makes, sums.

Each parameter has two pages. A pass reads the front one; the optimizer writes the back one while
the next pass runs, and turning the pages takes no copy. So no pass ever reads a half-written
weight, at the price of one more copy of what is trained.
"""

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ALIGNMENT = 256  # bytes; what kernels and copies like
_BLOCK = 1 << 20  # elements that are converted and added at once: they stay in the cache

Allocate = Callable[[int], torch.Tensor]


@dataclass
class Home:
    """One parameter of the model.

    Attributes:
        name: in the model.
        parameter: the model's own; its data is the front page.
        master: what the optimizer updates, in its own dtype; None before it is asked for.
        back: where the next value is written.
        total: the sum of gradients since the last step, in the optimizer's dtype; None if none.
        spare: memory of the sum before, which the next one takes: the optimizer is done with it.
        shown: what `show` put into the parameter's `.grad`, and its version.
    """

    name: str
    parameter: nn.Parameter
    master: nn.Parameter | None = None
    back: torch.Tensor | None = None
    total: torch.Tensor | None = None
    spare: torch.Tensor | None = None
    shown: tuple[torch.Tensor, int] | None = None

    def make_master(self, dtype: torch.dtype | None) -> None:
        """The optimizer's copy of the value."""
        data = self.parameter.detach()
        self.master = nn.Parameter(data.to(dtype or data.dtype, copy=True))

    def collect(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Adds a gradient to the sum."""
        if self.total is not None:
            add_to(self.total, gradient)
        elif self.spare is not None:  # new memory would cost more than the sum itself
            self.total, self.spare = self.spare.copy_(gradient), None
        else:
            self.total = gradient.to(dtype or gradient.dtype, copy=True)

    def show(self) -> None:
        """Puts the sum into the parameter's `.grad`; it stays the sum."""
        if self.total is not None:
            with torch.inference_mode(False):
                gradient = self.total.to(self.parameter.dtype, copy=True)
            self.parameter.grad, self.shown = gradient, (gradient, gradient._version)
        elif self.parameter.requires_grad:
            self.parameter.grad = None

    def take_shown_gradient(self) -> None:
        """What was done to the gradient that was shown holds for the sum: cleared, clipped."""
        if self.shown is None:
            return
        (gradient, version), self.shown = self.shown, None
        now = self.parameter.grad
        if now is None:
            self.total = None
        elif self.total is not None and (now is not gradient or now._version != version):
            self.total = now.detach().to(self.total.dtype, copy=True)

    def hand_over(self) -> None:
        """Gives the sum to the optimizer, whose `.grad` it stays until the next one begins."""
        assert self.master is not None
        self.spare = self.total if self.total is not None else self.spare
        self.master.grad, self.total = self.total, None

    def write_back(self) -> None:
        """Puts the optimizer's value onto the back page."""
        assert self.master is not None and self.back is not None
        self.back.copy_(self.master.detach())

    def turn(self) -> None:
        """The back page becomes the front one."""
        assert self.back is not None
        front = self.parameter.data
        self.parameter.data, self.back = self.back, front


@dataclass
class HostWeights:
    """One layer of the model.

    Attributes:
        homes: of its parameters, each once.
        buffers: its buffers, each once.
        staged: of each trained parameter, by its id, where its gradient arrives from the device.
        collected: is done when what is staged was added up.
    """

    layer: nn.Module
    homes: list[Home]
    buffers: list[torch.Tensor]
    staged: dict[int, torch.Tensor] = field(default_factory=dict)
    collected: Future | None = None

    def make_masters(self, dtype: torch.dtype | None, allocate: Allocate) -> None:
        """The optimizer's copies of what is trained, and second pages; of each home once."""
        new = [home for home in self.homes if home.parameter.requires_grad and home.master is None]
        pages = page_views([home.parameter.detach() for home in new], allocate) if new else []
        for home, page in zip(new, pages, strict=True):
            home.make_master(dtype)
            home.back = page

    def staged_for(self, home: Home, allocate: Allocate) -> torch.Tensor:
        """Where the gradient of a parameter arrives; made when the first one comes."""
        if id(home.parameter) not in self.staged:
            trained = [each.parameter for each in self.homes if each.parameter.requires_grad]
            views = page_views(trained, allocate)
            self.staged |= {id(each): view for each, view in zip(trained, views, strict=True)}
        return self.staged[id(home.parameter)]

    def wait_until_collected(self) -> None:
        """Returns when the staged gradients may be overwritten.

        Raises:
            Exception: what the worker raised.
        """
        if self.collected is not None:
            self.collected.result()

    @property
    def is_trained(self) -> bool:
        return any(home.parameter.requires_grad for home in self.homes)


def make_host_weights(layers: Sequence[nn.Module], names: dict[int, str]) -> list[HostWeights]:
    """Host weights of each layer; a parameter of several layers has one home.

    Args:
        names: of each parameter in the model, by its id.
    """
    homes: dict[int, Home] = {}
    hosted_layers = []
    for layer in layers:
        own = []
        for parameter in layer.parameters():
            name = names.get(id(parameter), "")
            own.append(homes.setdefault(id(parameter), Home(name, parameter)))
        hosted_layers.append(HostWeights(layer, own, list(layer.buffers())))
    return hosted_layers


def all_homes(hosted_layers: Iterable[HostWeights]) -> list[Home]:
    """Each home once, in the order of layers."""
    found = {id(home): home for hosted in hosted_layers for home in hosted.homes}
    return list(found.values())


def update(homes: Sequence[Home], step: Callable[[], None]) -> None:
    """One optimizer step: the masters get the summed gradients, the back pages what it makes."""
    for home in homes:
        home.hand_over()
    step()
    for home in homes:
        home.write_back()


def page_views(tensors: Sequence[torch.Tensor], allocate: Allocate) -> list[torch.Tensor]:
    """Room for each tensor, views of one run of bytes: a run takes no more than its parts.

    Args:
        allocate: number of bytes -> uint8 tensor.
    """
    starts, end = offsets(tensors)
    page = allocate(max(end, 1))
    return [view_at(page, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a run of bytes, and how long the run is."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        num_bytes = tensor.numel() * tensor.element_size()
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def view_at(page: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and dtype of `like` that begins at byte `start` of a run."""
    num_bytes = like.numel() * like.element_size()
    return page[start : start + num_bytes].view(like.dtype).view(like.shape)


def add_to(total: torch.Tensor, addend: torch.Tensor) -> None:
    """total += addend, where dtypes may differ.

    torch's addition of mixed dtypes is some 20 times slower than converting a block and adding it.
    """
    if total.dtype == addend.dtype:
        total += addend
        return
    flat_total, flat_addend = total.view(-1), addend.reshape(-1)
    for start in range(0, flat_total.numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        flat_total[part] += flat_addend[part].to(total.dtype)


# -- a layer with other tensors in it: the same modules by all they do, but not their weights -----
# The layer itself stays on the host. A shell has its hooks and shares its settings and plain
# attributes; a hook that is put on a shell, as transformers does to record outputs, ends with it.


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
