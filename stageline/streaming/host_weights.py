"""Weights on the host: the values that passes read, those of the optimizer, and gradient sums.

Each parameter has two pages. A pass reads the front one; the optimizer writes the back one while
the next pass runs, and turning the pages takes no copy. So no pass ever reads a half-written
weight, at the price of one more copy of the trained weights.
"""

import functools
import os
import re
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stageline.device import accelerators, available_memory, is_accelerator
from stageline.errors import UserError
from stageline.modules.quantised import make_scales_parameters, placed

ALIGNMENT = 256  # bytes; what kernels and copies like
PAGE = 4096  # bytes that are pinned at once
# settings of torch's allocators, and the key from which on a pinned block is not rounded up
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ROUND_UP = "pinned_max_round_threshold_mb"
_BLOCK = 1 << 20  # elements that are converted and added at once: they stay in the cache

Run = tuple[int, int]  # first address, behind the last


@dataclass
class Home:
    """One parameter of the model.

    Attributes:
        parameter: the model's own; its data is the front page.
        master: what the optimizer updates, in its own dtype; None before it is asked for.
        back: where the next value is written.
        total: the sum of gradients since the last step, in the optimizer's dtype; None if none.
        spare: memory of the sum before, which the next one takes: the optimizer is done with it.
        shown: what `show` put into the parameter's `.grad`, and its version.
    """

    parameter: nn.Parameter
    master: nn.Parameter | None = None
    back: torch.Tensor | None = None
    total: torch.Tensor | None = None
    spare: torch.Tensor | None = None
    shown: tuple[torch.Tensor, int] | None = None

    def make_master(self, dtype: torch.dtype | None, page: torch.Tensor) -> None:
        data = self.parameter.detach()
        self.master = nn.Parameter(data.to(dtype or data.dtype, copy=True))
        self.back = page

    def collect(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Add a gradient to the sum."""
        if self.total is not None:
            add_to(self.total, gradient)
        elif self.spare is not None:  # new memory would cost more than the sum itself
            self.total, self.spare = self.spare.copy_(gradient), None
        else:
            self.total = gradient.to(dtype or gradient.dtype, copy=True)

    def show(self) -> None:
        """Put the sum into the parameter's `.grad`; it stays the sum."""
        if self.total is not None:
            with torch.inference_mode(False):
                gradient = self.total.to(self.parameter.dtype, copy=True)
            self.parameter.grad, self.shown = gradient, (gradient, gradient._version)
        elif self.parameter.requires_grad:
            self.parameter.grad = None

    def take_shown_gradient(self) -> None:
        """Apply to the sum what was done to the gradient that was shown: cleared, clipped."""
        if self.shown is None:
            return
        (gradient, version), self.shown = self.shown, None
        now = self.parameter.grad
        if now is None:
            self.total = None
        elif self.total is not None and (now is not gradient or now._version != version):
            self.total = now.detach().to(self.total.dtype, copy=True)

    def turn(self) -> None:
        """The back page becomes the front one."""
        assert self.back is not None
        front = self.parameter.data
        self.parameter.data, self.back = self.back, front


def update(homes: Sequence[Home], step: Callable[[], None]) -> None:
    """One optimizer step: the masters get the summed gradients, the back pages what it makes."""
    for home in homes:
        assert home.master is not None
        # the sum stays the master's gradient until the next one begins
        home.spare = home.total if home.total is not None else home.spare
        home.master.grad, home.total = home.total, None
    step()
    for home in homes:
        assert home.master is not None and home.back is not None
        home.back.copy_(home.master.detach())


@dataclass
class HostWeights:
    """One layer of the model, with its parameters and buffers, each once.

    Attributes:
        staged: of each trained parameter, by its id, where its gradient arrives from the device.
        collected: is done when what is staged was added up.
    """

    layer: nn.Module
    homes: list[Home]
    buffers: list[torch.Tensor]
    staged: dict[int, torch.Tensor] = field(default_factory=dict)
    collected: Future | None = None

    def make_masters(self, dtype: torch.dtype | None) -> None:
        """The optimizer's copies of what is trained, and second pages; of each home once."""
        new = [home for home in self.homes if home.parameter.requires_grad and home.master is None]
        for home, page in zip(new, page_views([home.parameter for home in new]), strict=True):
            home.make_master(dtype, page)

    def staged_for(self, home: Home) -> torch.Tensor:
        """Return the memory where the gradient of a parameter arrives; made at its first use."""
        if id(home.parameter) not in self.staged:
            trained = [each.parameter for each in self.homes if each.parameter.requires_grad]
            views = page_views(trained)
            self.staged |= {id(each): view for each, view in zip(trained, views, strict=True)}
        return self.staged[id(home.parameter)]

    @property
    def is_trained(self) -> bool:
        return any(home.parameter.requires_grad for home in self.homes)


def make_host_weights(layers: Iterable[nn.Module]) -> list[HostWeights]:
    """Host weights of each layer; a parameter of several layers has one home."""
    homes: dict[int, Home] = {}
    codes: dict[bytes, nn.Parameter] = {}
    hosted_layers = []
    for layer in layers:
        values = dict.fromkeys((*layer.parameters(), *make_scales_parameters(layer, codes)))
        own = [homes.setdefault(id(each), Home(each)) for each in values]
        hosted_layers.append(HostWeights(layer, own, list(layer.buffers())))
    return hosted_layers


def all_homes(hosted_layers: Iterable[HostWeights]) -> list[Home]:
    """Each home once, in the order of layers."""
    found = {id(home): home for hosted in hosted_layers for home in hosted.homes}
    return list(found.values())


def allocate(num_bytes: int) -> torch.Tensor:
    """Bytes of the host, which a GPU reads and writes without the processor."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=bool(accelerators()))


def page_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Room for each tensor, views of one run of bytes: a run takes no more than its parts."""
    starts, end = offsets(tensors)
    page = allocate(end)
    return [view_at(page, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the start of each tensor in a run of bytes, and the length of the run."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def view_at(page: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and dtype of `like` that begins at byte `start` of a run."""
    return page[start : start + like.nbytes].view(like.dtype).view(like.shape)


def add_to(total: torch.Tensor, addend: torch.Tensor) -> None:
    """total += addend; torch's addition of mixed dtypes is 20 times slower than block by block."""
    if total.dtype == addend.dtype:
        total += addend
        return
    flat_total, flat_addend = total.view(-1), addend.reshape(-1)
    for start in range(0, flat_total.numel(), _BLOCK):
        part = slice(start, start + _BLOCK)
        flat_total[part] += flat_addend[part].to(total.dtype)


def host_bytes(hosted_layers: Sequence[HostWeights], optim_dtype: torch.dtype | None) -> int:
    """Return the bytes of weights, pages, gradients, their sums and the optimizer's copies."""
    total, paged = 0, set[int]()
    for hosted in hosted_layers:
        trained = [home.parameter for home in hosted.homes if home.parameter.requires_grad]
        new = [home.parameter for home in hosted.homes if id(home) not in paged]
        paged |= {id(home) for home in hosted.homes}
        total += _page_bytes(new, is_pinned=any(each.is_pinned() for each in new))
        backs = [each for each in new if each.requires_grad]
        total += _page_bytes(backs) + _page_bytes(trained if backs else [])  # back page, staged
        for parameter in backs:  # sum, master
            total += 2 * parameter.numel() * (optim_dtype or parameter.dtype).itemsize
    return total


def _page_bytes(tensors: Sequence[torch.Tensor], *, is_pinned: bool | None = None) -> int:
    """Return the size of a run of bytes with these tensors; if pinned, that of torch's block."""
    if not (accelerators() if is_pinned is None else is_pinned):
        return sum(tensor.nbytes for tensor in tensors)
    return pinned_block(offsets(tensors)[1])


def pinned_block(num_bytes: int) -> int:
    """Return the host bytes that torch allocates for a pinned tensor of `num_bytes`."""
    told = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    found = re.search(rf"{ROUND_UP}:(\d+)", told)
    if num_bytes == 0 or (found is not None and num_bytes > int(found[1]) << 20):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def check_host_memory(
    hosted_layers: Sequence[HostWeights], optim_dtype: torch.dtype | None
) -> None:
    """Refuse a model that would exceed the memory of the machine, before any is allocated."""
    weights = sum(home.parameter.nbytes for home in all_homes(hosted_layers))
    needed, there = host_bytes(hosted_layers, optim_dtype) - weights, available_memory()
    if there is not None and needed > there:
        raise MemoryError(
            f"training takes {needed:,} bytes of host memory next to weights and optimizer state, "
            f"{there:,} are free. Freeze more of the model, or train adapters."
        )


def make_pages(
    hosted_layers: Sequence[HostWeights], pin_model: str, *, device: torch.device, owner: object
) -> None:
    """Move weights to memory from which an accelerator fetches them quickly.

    Args:
        owner: memory that is registered in place is unregistered when this object is deleted.
    """
    if not is_accelerator(device) or pin_model == "off":
        return
    for hosted in hosted_layers:
        # buffers that a pass changes are copied back, and a copy to pageable memory would block
        for buffer in hosted.buffers:
            if not buffer.is_pinned():
                buffer.data = buffer.detach().pin_memory()
    if pin_model == "register":
        if device.type != "cuda":
            raise UserError(f"`pin_model` register needs CUDA, not {device}. Use alloc or off.")
        values = [home.parameter.detach() for home in all_homes(hosted_layers)]
        runs = _register([each for each in values if not each.is_pinned()])
        weakref.finalize(owner, _unregister, runs).atexit = False
        return
    placed: set[int] = set()
    for hosted in hosted_layers:
        homes = [home for home in hosted.homes if id(home) not in placed]
        placed |= {id(home) for home in homes}
        values = [home.parameter.detach() for home in homes]
        for home, view, value in zip(homes, page_views(values), values, strict=True):
            home.parameter.data = view.copy_(value)
            if hasattr(home.parameter, "CB"):  # int8: the same memory under another name
                home.parameter.CB = home.parameter.data


def _register(values: Sequence[torch.Tensor]) -> list[Run]:
    done: list[Run] = []
    for run in page_runs((each.data_ptr(), each.data_ptr() + each.nbytes) for each in values):
        code = int(torch.cuda.cudart().cudaHostRegister(run[0], run[1] - run[0], 0))
        if code != 0:
            _unregister(done)
            raise RuntimeError(
                f"cudaHostRegister returned {code} for {run[1] - run[0]:,} bytes. Raise the limit "
                "of locked memory (ulimit -l), or use pin_model='alloc' or 'off'."
            )
        done.append(run)
    return done


def _unregister(runs: Sequence[Run]) -> None:
    """Unpin memory; else another model at the same addresses could not be pinned."""
    torch.cuda.synchronize()  # copies on their way read it
    for start, _ in runs:
        torch.cuda.cudart().cudaHostUnregister(start)


def page_runs(ranges: Iterable[Run]) -> list[Run]:
    """Ranges of addresses as runs of whole pages: small tensors share one, which is pinned once."""
    runs: list[Run] = []
    for start, end in sorted(each for each in ranges if each[0] < each[1]):
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    return runs


def shell_of(layer: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A twin of the module tree that computes with `tensors`; the layer stays on the host.

    It has the layer's hooks and shares its settings and plain attributes. A hook that is put on a
    shell, as transformers does to record outputs, ends with it.

    Args:
        tensors: by the id of a parameter or buffer; those that are not in it stay the layer's.
    """
    return _twin(layer, tensors, {})


def _twin(module: nn.Module, tensors: Mapping[int, torch.Tensor], made: dict[int, Any]) -> Any:
    if id(module) in made:  # a module that stands in two places stays one
        return made[id(module)]
    twin = made[id(module)] = module.__class__.__new__(module.__class__)
    own = dict(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: placed(value, tensors) for name, value in own[kind].items()}
    own["_modules"] = {
        name: None if child is None else _twin(child, tensors, made)
        for name, child in own["_modules"].items()
    }
    if "_flat_weights_names" in own:  # recurrent layers keep a list of their weights
        names = own["_flat_weights_names"]
        own["_flat_weights"] = [own["_parameters"].get(name) for name in names]
    twin.__dict__.update(
        {name: placed(_rebound(value, made), tensors) for name, value in own.items()}
    )
    for name, value in own.items():
        # another module over the same children: a stage model keeps the whole model it came from
        if isinstance(value, nn.Module) and value._modules is module._modules:
            facade = twin.__dict__[name] = value.__class__.__new__(value.__class__)
            kinds = ("_parameters", "_buffers", "_modules")
            facade.__dict__.update({**value.__dict__, **{k: twin.__dict__[k] for k in kinds}})
    return twin


def _rebound(value: Any, made: Mapping[int, Any]) -> Any:
    """Rebind a method of a module (a wrapped `forward`, a hook) to its twin; keep other values."""
    if isinstance(value, types.MethodType) and id(value.__self__) in made:
        return types.MethodType(value.__func__, made[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = [_rebound(each, made) for each in value.args]
        keywords = {name: _rebound(each, made) for name, each in value.keywords.items()}
        return functools.partial(_rebound(value.func, made), *arguments, **keywords)
    if isinstance(value, OrderedDict):  # hooks: a shell gets a dictionary of its own
        return OrderedDict((key, _rebound(each, made)) for key, each in value.items())
    return value
