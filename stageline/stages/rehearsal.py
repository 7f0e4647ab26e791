"""One forward pass of a whole model that is watched: who reads which weight, and when.

The model has stand-ins for its weights, which take no memory: at its own size it runs on fake
tensors, which have shapes and no values; a small one runs for real, which more code can take. Not
here: what follows from it for a split (split_plan.py).

A tensor that depends on a weight is called tainted. Other tensors follow only from the batch, and
every stage makes them itself.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from stageline.pipeline.live_bytes import storage_of

# they read the shape, dtype and device of a tensor argument, not its values
_SHAPE_ONLY = ("_like", "aten::new_")
FAKE_DTYPE = torch.bfloat16  # grouped products of experts take no other on fake tensors
_SMALL = 5_000_000  # numbers; a model with fewer is rehearsed for real
Path = tuple[Any, ...]
Identity = tuple[Any, ...]


@dataclass
class Leaf:
    """A tensor among the arguments of a call.

    Attributes:
        path: ("a" or "k", then keys and indices) from the arguments of the call.
        identity: equal for the same view of the same storage.
        born: when its storage was written last, at the time of the call.
        value: the tensor itself.
    """

    path: Path
    identity: Identity
    born: int
    is_tainted: bool
    value: torch.Tensor


@dataclass
class TracedCall:
    """One call of a module; times are counted in operators.

    Attributes:
        has_graph: autograd would follow what happens inside.
    """

    start: int
    end: int = -1
    leaves: list[Leaf] = field(default_factory=list)
    output: Any = None
    has_graph: bool = True


class ForwardTrace(TorchDispatchMode):
    """Watches all operators and modules of one forward pass.

    Attributes:
        weight_reads: id of a weight's storage -> times at which its values were read.
        reads: (time, storage, operator) of each read of a tainted tensor that is not a weight.
        last_read, born: storage -> when its values were read last, tainted or not; and written.
    """

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.now = 0
        self.calls: dict[str, list[TracedCall]] = {}
        self.weight_reads: dict[int, list[int]] = {}
        self.reads: list[tuple[int, int, str]] = []
        self.last_read: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self._weights = {storage_of(weight) for weight in whole.parameters()}
        self._tainted = set(self._weights)
        self._kept: list[Any] = []  # a storage that is freed would give its address to another

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.now += 1
        inputs = {storage_of(value) for value in _tensors((args, kwargs))}
        outputs = _tensors(output)
        is_mutable = func._schema.is_mutable
        is_view = not is_mutable and bool(outputs) and {*map(storage_of, outputs)} <= inputs
        reads = not is_view and not any(part in func.name() for part in _SHAPE_ONLY)
        for storage in inputs if reads else ():
            self.last_read[storage] = self.now
            if storage in self._weights:
                self.weight_reads.setdefault(storage, []).append(self.now)
            elif storage in self._tainted:
                self.reads.append((self.now, storage, func.name()))
        is_tainted = (reads or is_view) and not inputs.isdisjoint(self._tainted)
        for value in outputs:
            storage = storage_of(value)
            if storage not in inputs:
                self._kept.append(value)
                self.born[storage] = self.now
                self._tainted.discard(storage)
            elif is_mutable and storage not in self._weights:
                self.born[storage] = self.now
            if is_tainted:
                self._tainted.add(storage)
        return output

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the call of a module; a hook."""
        self.now += 1
        leaves = []
        for path, value in walk({"a": args, "k": kwargs}):
            storage = storage_of(value)
            is_tainted = storage in self._tainted and storage not in self._weights
            born = self.born.get(storage, 0)
            self._kept.append(value)
            leaves.append(Leaf(path, identity_of(value), born, is_tainted, value))
        self.calls.setdefault(name, []).append(
            TracedCall(self.now, leaves=leaves, has_graph=torch.is_grad_enabled())
        )

    def leave(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        """The last call of a module returns; a hook."""
        self.now += 1
        call = next(call for call in reversed(self.calls[name]) if call.end < 0)
        call.end, call.output = self.now, output
        self._kept += _tensors(output)

    def is_tainted(self, value: torch.Tensor) -> bool:
        """Whether it depends on a weight, as things stand at the end."""
        return storage_of(value) in self._tainted


def rehearse(whole: nn.Module, run: Callable[[], object], batch: Mapping[str, Any]) -> ForwardTrace:
    """Watches `run`, a forward pass of `whole` on `batch`; nothing stays on the model."""
    watched = ForwardTrace(whole)
    watched._kept += _tensors(dict(batch))
    handles: list[RemovableHandle] = []

    for name, module in whole.named_modules():
        if name:
            enter = functools.partial(watched.enter, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(watched.leave, name)))
    try:
        # no stand-in asks for a gradient; where the mode is off, the model has turned it off
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), watched:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return watched


@contextmanager
def stand_ins(whole: nn.Module, *, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Give a model on meta weights that it can run with, and remove them afterwards.

    Those of a large model are fake: they have shapes only. What is tied stays tied. Numbers in the
    batch stay real, so code that asks for their values can. Yields the dtype that the model has.

    Args:
        dtype: of the model; fake weights have FAKE_DTYPE in its place, which all kernels know.
    """
    is_fake = sum(weight.numel() for weight in whole.parameters()) > _SMALL
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(meta: torch.Tensor) -> torch.Tensor:
        if not is_fake:  # not zero: normalizing zeros divides by zero
            value = 1e-2 if meta.is_floating_point() else 0
            return torch.full(meta.shape, value, dtype=meta.dtype, device="cpu")
        with fake_mode:
            of = FAKE_DTYPE if meta.dtype == dtype else meta.dtype
            return torch.empty(meta.shape, dtype=of, device="cpu")

    made: dict[int, torch.Tensor] = {}
    put: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in whole.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for holder in holders:
            for name, value in list(holder.items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    if id(value) not in made:
                        made[id(value)] = make(value)
                    put.append((holder, name, value))
                    holder[name] = made[id(value)]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # exceptions report the failures
    try:
        yield FAKE_DTYPE if is_fake else dtype
    finally:
        log.setLevel(level)
        for holder, name, value in put:
            holder[name] = value


@dataclass(frozen=True)
class Key:
    """A key of a mapping in a path, where it could be taken for an index."""

    value: Any


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """(path, tensor) of all tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from walk(value[key], (*path, key if isinstance(key, str) else Key(key)))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from walk(one, (*path, index))


def identity_of(value: torch.Tensor) -> Identity:
    """Equal for the same view of the same storage."""
    return storage_of(value), value.storage_offset(), tuple(value.shape), value.stride()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
