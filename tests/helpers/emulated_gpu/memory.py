"""The storages of emulated cards and the page-locked ones of the host: their keys and sizes.

A card's figures are those of torch's allocator without fragmentation: blocks of 512 bytes.
"""

import itertools
import weakref

import torch

from tests.helpers.emulated_gpu.order import Actor, Order, Part
from tests.helpers.emulated_gpu.tensor import CardTensor

BLOCK = 512


class Memory:
    """A record that gives each storage a key, and tells `order` when it comes and goes.

    Attributes:
        allocated: bytes that a card's tensors have now.
        peak: the most since the peak was reset.
        size: bytes of each card.
    """

    def __init__(self, order: Order, *, count: int, size: int) -> None:
        self.size = size
        self.allocated = [0] * count
        self.peak = [0] * count
        self.registered: dict[int, int] = {}  # cudaHostRegister: first address -> behind the last
        self._order = order
        self._keys: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._next = itertools.count()

    def key(self, tensor: torch.Tensor) -> int | None:
        """Return the key of a followed storage: a card's, or one of the host used with a card."""
        if isinstance(tensor, CardTensor) and tensor.storage_key is not None:
            return tensor.storage_key
        return self._keys.get(tensor.untyped_storage())

    def part(self, tensor: torch.Tensor) -> Part | None:
        """The bytes of a storage that is followed from a tensor's first to its last value."""
        key = self.key(tensor)
        return None if key is None else _part(key, tensor)

    def host_part(self, tensor: torch.Tensor) -> Part:
        """Return the bytes of a storage on the host, which is followed from here."""
        return _part(self._follow(tensor.untyped_storage(), owner=None), tensor)

    def place(self, values: torch.Tensor, device: torch.device, owner: Actor) -> CardTensor:
        """Makes a card's tensor of values on the host, whose storage is new or known.

        Raises:
            torch.OutOfMemoryError: the card has no room for it.
        """
        storage = values.untyped_storage()
        key = self._keys.get(storage)
        if key is None:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.refuse(size, device.index)
            self.allocated[device.index] += size
            self.peak[device.index] = max(self.peak[device.index], self.allocated[device.index])
            key = self._follow(storage, owner=owner, size=size)
        made = CardTensor(values, device)
        made.storage_key = key
        return made

    def refuse(self, size: int, card: int) -> None:
        """Raise torch's error if a card has no room for `size` bytes."""
        free = self.size - self.allocated[card]
        if size > free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU {card} has a "
                f"total capacity of {self.size / 2**30:.2f} GiB of which {free / 2**20:.2f} MiB is "
                "free. (an emulated card)"
            )

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Treat a storage on the host as page-locked."""
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from and to this tensor of the host need not wait."""
        if isinstance(tensor, CardTensor) or tensor.layout != torch.strided or tensor.is_meta:
            return False
        if tensor.untyped_storage() in self._pinned:
            return True
        start = tensor.data_ptr() if self.registered else 0
        return any(first <= start < end for first, end in self.registered.items())

    def has_pinned(self) -> bool:
        """Whether anything on the host is page-locked."""
        return bool(self._pinned or self.registered)

    def _follow(self, storage: torch.UntypedStorage, *, owner: Actor | None, size: int = 0) -> int:
        key = self._keys.get(storage)
        if key is None:
            key = self._keys[storage] = next(self._next)
            self._order.allocate(key, owner)
            end = weakref.finalize(storage, self._free, key, owner, size)
            end.atexit = False
        return key

    def _free(self, key: int, owner: Actor | None, size: int) -> None:
        if owner is not None:
            self.allocated[owner[0]] -= size
        self._order.free(key)


def _part(key: int, tensor: torch.Tensor) -> Part:
    values = tensor.values if isinstance(tensor, CardTensor) else tensor
    size, count = values.element_size(), values.numel()
    first = values.storage_offset() * size
    if count == 0 or values.is_contiguous():
        return key, first, first + count * size
    last = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
    return key, first, first + (last + 1) * size
