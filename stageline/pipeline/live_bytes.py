"""Measure the bytes of live tensors on any device: saved by passes, and needed for a while.

On an accelerator torch's allocator counts them. On a CPU every operation is watched, which takes
time: bytes and seconds are measured in passes of their own.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from stageline.device import is_accelerator, synchronize


class PeakBytes:
    """The most bytes that were alive inside, beyond those at the start.

    Attributes:
        peak: bytes, valid after the block: since its start, or the last `lap`.
        kept: bytes more than at the start that live on at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = self.kept = self._before = 0
        self._live: _LiveBytes | None = None

    @contextmanager
    def watch(self) -> Iterator["PeakBytes"]:
        """Count within this block."""
        if is_accelerator(self.device):
            self.lap()
            self._before += self.kept
            yield self
        else:
            with _LiveBytes() as self._live:
                yield self
        self.lap()

    def lap(self) -> int:
        """The peak until now; a new one is looked for from here on."""
        if self._live is not None:
            self.peak, self.kept = self._live.peak, self._live.alive
            self._live.peak = self._live.alive
            return self.peak
        synchronize(self.device)
        module = torch.get_device_module(self.device)
        self.peak = module.max_memory_allocated(self.device) - self._before
        self.kept = module.memory_allocated(self.device) - self._before
        module.reset_peak_memory_stats(self.device)
        return self.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, _: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._known.setdefault(storage, 0)  # it was there before: a parameter, an input
        made = func(*args, **kwargs)
        for storage in _storages(made):
            if storage not in self._known:
                size = storage.nbytes()
                self._known[storage] = size
                self.alive += size
                weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.alive)
        return made

    def _free(self, size: int) -> None:
        self.alive -= size


class SavedBytes:
    """Bytes that autograd saves for the backward pass, each storage once.

    Args:
        owned: tensors that are there anyway: parameters and buffers.
    """

    def __init__(self, owned: Iterator[torch.Tensor]) -> None:
        self._owned = {storage_of(tensor) for tensor in owned}
        self._saved: dict[int, int] = {}
        self.shared: set[int] = set()  # storages that other layers of the stage save as well

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_of(tensor) not in self._owned:
            self._saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def share(self, values: object, *, is_held: bool) -> None:
        """Mark tensors as common to the layers of a stage; what `is_held` is kept in any case."""
        for tensor in _tensors(values):
            self.shared.add(storage_of(tensor))
            if is_held:
                self.add(tensor)

    @property
    def own_bytes(self) -> int:
        return sum(size for key, size in self._saved.items() if key not in self.shared)

    @property
    def shared_bytes(self) -> int:
        return sum(size for key, size in self._saved.items() if key in self.shared)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of tensors on any device, meta included."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a key that is equal for views of each other."""
    return tensor.untyped_storage()._cdata


def _tensors(values: object) -> list[torch.Tensor]:
    tensors = (value for value in tree_iter(values) if isinstance(value, torch.Tensor))
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in _tensors(values)]
