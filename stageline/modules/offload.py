"""Saved activations wait for their backward pass in host memory, and come back in time for it.

Copies run on streams of their own beside the computation, out of pinned memory. Parameters stay
where they are: the graph only borrows them. A device without memory of its own moves nothing.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 20  # below it a copy costs more in launches than it saves in memory
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def is_worth_moving(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor lies on a GPU and is large."""
    return tensor.is_cuda and tensor.numel() * tensor.element_size() >= MIN_BYTES


@contextmanager
def offloaded(
    model: nn.Module, *, moves: Callable[[torch.Tensor], bool] = is_worth_moving
) -> Iterator[None]:
    """Inside, tensors saved for the backward pass go to host memory.

    Args:
        model: its parameters and buffers are left alone, under any view.
        moves: which other tensors go.
    """
    held = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    held |= {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
    waiting_room = _WaitingRoom(held, moves)
    with torch.autograd.graph.saved_tensors_hooks(waiting_room.pack, _unpack):
        yield


def offload_activations(
    model: nn.Module, *, moves: Callable[[torch.Tensor], bool] = is_worth_moving
) -> None:
    """From now on `model.forward` runs inside `offloaded`. In place."""
    forward = model.forward

    def offloading_forward(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offloaded(model, moves=moves):
            return forward(*args, **kwargs)

    model.forward = offloading_forward


class _WaitingRoom:
    """The tensors that one forward pass moved; a tensor that is saved twice is moved once."""

    def __init__(self, held: set[int], moves: Callable[[torch.Tensor], bool]) -> None:
        self.held = held
        self.moves = moves
        self.seen: dict[tuple, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self.last: weakref.ref[_Moved] | None = None

    def pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Moved":
        storage = tensor.untyped_storage()
        is_expanded = storage.nbytes() < tensor.numel() * tensor.element_size()
        if storage.data_ptr() in self.held or is_expanded or not self.moves(tensor):
            return tensor
        alive = StorageWeakRef(storage)
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        key = (alive.cdata, tensor._version, *layout)
        known = self.seen.get(key)
        # an address may be used again once its storage is gone
        moved = known[1]() if known is not None and not known[0].expired() else None
        if moved is None:
            moved = _Moved(tensor, before=self.last)
            self.seen[key] = (alive, weakref.ref(moved))
            self.last = weakref.ref(moved)
        return moved


def _unpack(saved: "torch.Tensor | _Moved") -> torch.Tensor:
    return saved.take() if isinstance(saved, _Moved) else saved


class _Moved:
    """A tensor in host memory, and the way back.

    Args:
        before: the one that was moved before it; it is fetched ahead, since a backward pass goes
            through them in reverse.
    """

    def __init__(self, tensor: torch.Tensor, *, before: "weakref.ref[_Moved] | None") -> None:
        self.device = tensor.device
        self.stride = tensor.stride()
        self.before = before
        self.on_device: torch.Tensor | None = None
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self.host.copy_(tensor)
            return
        out = _stream(self.device, "out")
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # its memory may be given away only after the copy
        self.copied = out.record_event()

    def take(self) -> torch.Tensor:
        """The tensor on its device, ready for the current stream."""
        if self.device.type != "cuda":
            return self._restored()
        self.fetch()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.fetched)
        tensor, self.on_device = self.on_device, None  # a second walk fetches it again
        tensor.record_stream(current)
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return tensor

    def fetch(self) -> None:
        """Starts the way back, once."""
        if self.on_device is not None:
            return
        back = _stream(self.device, "in")
        back.wait_event(self.copied)
        with torch.cuda.stream(back):
            self.on_device = self._restored()
        self.fetched = back.record_event()

    def _restored(self) -> torch.Tensor:
        # the strides too, which a slice loses in a copy: some kernels round differently by them
        size, dtype = self.host.size(), self.host.dtype
        tensor = torch.empty_strided(size, self.stride, dtype=dtype, device=self.device)
        return tensor.copy_(self.host, non_blocking=True)


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    if (device, direction) not in _streams:
        _streams[device, direction] = torch.cuda.Stream(device)
    return _streams[device, direction]
