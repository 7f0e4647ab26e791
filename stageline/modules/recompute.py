"""Activation checkpointing: a call keeps only its inputs, and its activations are recomputed.

It works as torch.utils.checkpoint without reentrance, with one difference: a recomputed activation
is kept until the graph releases it, not until it was read once. A zero-bubble schedule walks one
graph twice, for the gradient of the inputs and later for that of the weights; torch's own function
would run the layer once more for each weight, and refuses the second walk where some outputs were
saved.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from stageline.device import generators_kept, generators_of, is_accelerator
from stageline.errors import UserError
from stageline.modules.pass_through import PassThrough


class RandomState:
    """Remembers the generators of the host and of one device as they are now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.states = [generator.get_state() for generator in generators_of([device])]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again inside; afterwards the generators are as before."""
        with generators_kept([self.device]) as generators:
            for generator, state in zip(generators, self.states, strict=True):
                generator.set_state(state)
            yield


# two context managers: around the first run, around the second
Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


class RecomputeError(RuntimeError):
    """The second run of a layer did not do what the first one did."""


class _AllMade(Exception):
    """Ends the second run early: the rest of the layer has nothing that the graph needs."""


class _Slot:
    """Stands in the graph for one saved tensor; filled by the second run."""

    __slots__ = ("__weakref__", "looks", "tensor")

    def __init__(self, looks: tuple[torch.Size, torch.dtype]) -> None:
        self.looks = looks
        self.tensor: torch.Tensor | None = None


class _KeepInputs(torch.autograd.Function):
    """Saves tensors where hooks around the layer see them, so that they can be offloaded."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> None:
        raise AssertionError("nothing depends on this node")


class _Frame:
    """One checkpointed call: its inputs, the generators before it, and the slots it left."""

    def __init__(
        self, function: Callable, args: tuple[object, ...], again: AbstractContextManager
    ) -> None:
        self.function = function
        self.again = again
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        self.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        anchor = torch.empty(0, requires_grad=True)
        # Keep the tensor, not only its node: torch 2.11 frees what the node saved with the tensor.
        self.inputs: Any = _KeepInputs.apply(anchor, *(tensor.detach() for tensor in tensors))
        self.random_state = RandomState(tensors[0].device if tensors else torch.device("cpu"))
        self.slots: list[weakref.ref[_Slot]] = []
        self.num_made = 0
        self.is_done = False

    def pack(self, tensor: torch.Tensor) -> _Slot:
        """First run: the graph gets a slot in the place of a tensor."""
        slot = _Slot((tensor.shape, tensor.dtype))
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> torch.Tensor:
        """Backward pass: the first slot that is read makes all of them."""
        if not self.is_done:
            args = list(self.others)
            kept = self.inputs.grad_fn.saved_tensors
            for place, tensor, needs_grad in zip(self.places, kept, self.needs_grad, strict=True):
                args[place] = tensor.detach().requires_grad_(needs_grad)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._fill, lambda tensor: tensor)
            with torch.enable_grad(), self.random_state.replayed(), self.again, hooks:
                try:
                    self.function(*args)
                except _AllMade:
                    pass
                except RuntimeError as error:
                    if "cached during selective activation checkpoint" not in str(error):
                        raise
                    raise UserError(_CHANGED) from error
            self.is_done = True
            self.inputs, self.others = None, []  # all that they are needed for is made
        if slot.tensor is None:
            raise RecomputeError(_MISMATCH.format(f"{self.num_made} tensors", len(self.slots)))
        return slot.tensor

    def _fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Second run: a tensor goes to its slot, if the graph still holds that."""
        slot = self.slots[self.num_made]() if self.num_made < len(self.slots) else None
        self.num_made += 1
        # cut off: a node that holds its own output would hold itself, and is never freed
        made = tensor.detach()
        if slot is not None:
            if (tensor.shape, tensor.dtype) != slot.looks:
                came = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise RecomputeError(_MISMATCH.format(came, slot.looks))
            slot.tensor = made
        if self.num_made == len(self.slots):
            raise _AllMade
        return made


_CHANGED = (
    "`recompute.mode` operators came with a model whose layers change the output of a matrix "
    "product in place, as experts with biases do. Choose `recompute.mode` full."
)
_MISMATCH = (
    "a checkpointed layer saved {} in its second run where the first one saved {}: its forward "
    "must do the same each time. Look for state that it changes, or drop `gradient_checkpointing`."
)


def recompute(
    function: Callable, *args: object, contexts: Contexts | None = None, **kwargs: object
) -> object:
    """Call `function(*args, **kwargs)` without keeping tensors for its backward pass.

    Dropout draws the same numbers again. Tensors among `args` may be offloaded while they wait;
    those among `kwargs` are held as they are.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    first, again = contexts() if contexts is not None else (nullcontext(), nullcontext())
    frame = _Frame(lambda *tensors: function(*tensors, **kwargs), args, again)
    with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack), first:
        return function(*args, **kwargs)


CheckpointMode = Literal["full", "operators"]

# Products of activations and weights. Not bmm: in eager attention that is [T, T] for each head.
_MATMULS = ("mm", "addmm", "_grouped_mm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_SAVED = {
    getattr(torch.ops.aten, name).default
    for name in (*_MATMULS, *_ATTENTION)
    if hasattr(torch.ops.aten, name)
}


def keep_products(
    context: object, operator: torch._ops.OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    """Keep the outputs of matrix products and fused attention; all else is recomputed.

    Attention with dropout is recomputed too: skipping it would shift the random numbers of what
    comes after it.
    """
    dropout: Any = 0.0
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else argument.default_value
            dropout = kwargs.get("dropout_p", given) or 0.0
    is_kept = operator in _SAVED and not float(dropout) > 0.0
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Contexts | None] = {
    "full": None,
    "operators": functools.partial(create_selective_checkpoint_contexts, keep_products),
}


def checkpoint_layers(
    layers: Iterable[tuple[int, nn.Module]], *, every: int = 1, mode: CheckpointMode = "full"
) -> None:
    """Recompute every n-th layer in the backward pass. In place; names of parameters stay.

    Args:
        layers: (index in the whole model, layer); a layer of another stage may be among them.
        every: layers 0, n, 2 n, ... of the whole model, so that each split recomputes the same.
        mode: "operators" keeps the outputs of matrix products and attention.
    """
    for index, layer in layers:
        if index % every == 0 and not isinstance(layer, PassThrough):
            layer.forward = functools.partial(recompute, layer.forward, contexts=CONTEXTS[mode])
            layer.__dict__["is_recomputed"] = True


def recomputes(model: nn.Module) -> bool:
    """Whether some layer of `model` is recomputed in the backward pass."""
    return any(getattr(module, "is_recomputed", False) for module in model.modules())


def tower_layers(model: nn.Module, *, but: Iterable[nn.Module]) -> list[tuple[int, nn.Module]]:
    """(index, layer) of the repeated layers that are not among `but`: those of a vision tower."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    left_out = {id(layer) for layer in but}
    found: list[tuple[int, nn.Module]] = []
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in left_out:
            found.append((int(leaf) if leaf.isdigit() else 0, module))
    return found


def compile_layers(layers: Iterable[tuple[int, nn.Module]], *, backend: str = "inductor") -> None:
    """Compile the forward of each layer. In place: no name of a parameter changes.

    Shapes are dynamic, since each micro-batch has a length of its own. A compiled layer is one
    node of the autograd graph: its gradients can't be split into those of inputs and of weights.
    """
    for _, layer in layers:
        if not isinstance(layer, PassThrough):
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


# Saved activations wait for their backward pass in host memory, and come back in time for it.
# Copies run on streams of their own, in parallel with the computation, out of pinned memory.
# Parameters stay where they are: the graph only borrows them. A device without memory of its own
# moves nothing.

MIN_BYTES = 1 << 20  # below it a copy costs more in launches than it saves in memory
_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def is_worth_moving(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is large and on an accelerator."""
    return is_accelerator(tensor.device) and tensor.numel() * tensor.element_size() >= MIN_BYTES


@contextmanager
def offloaded(
    model: nn.Module, *, moves: Callable[[torch.Tensor], bool] = is_worth_moving
) -> Iterator[None]:
    """Inside, tensors saved for the backward pass go to host memory.

    Args:
        model: its parameters and buffers are left alone, under any view.
    """
    held = _places(model.parameters()) | _places(model.buffers())

    def hold(module: nn.Module, args: object) -> None:
        held.update(_places(module.parameters()))

    # weights that replicas share out are put together when their module is called, elsewhere
    shared_out = [module for module in model.modules() if isinstance(module, FSDPModule)]
    handles = [cast(nn.Module, each).register_forward_pre_hook(hold) for each in shared_out]
    waiting_room = _WaitingRoom(held, moves)
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            waiting_room.pack, lambda saved: saved.take() if isinstance(saved, _Moved) else saved
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _places(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of tensors, without DTensors: no graph borrows these."""
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in whole}


def offload_activations(
    model: nn.Module, *, moves: Callable[[torch.Tensor], bool] = is_worth_moving
) -> None:
    """Wrap `model.forward` to run inside `offloaded`, in place."""
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


class _Moved:
    """A tensor in host memory, and the way back.

    Args:
        before: the one that was moved before it; fetched ahead, as a backward pass goes in reverse.
    """

    def __init__(self, tensor: torch.Tensor, *, before: "weakref.ref[_Moved] | None") -> None:
        self.device = tensor.device
        self.stride = tensor.stride()
        self.before = before
        self.on_device: torch.Tensor | None = None
        self.has_streams = is_accelerator(self.device)
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=self.has_streams)
        if not self.has_streams:
            self.host.copy_(tensor)
            return
        self.module = torch.get_device_module(self.device)
        out = _stream(self.device, "out")
        out.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(out):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # its memory may be given away only after the copy
        self.copied = out.record_event()

    def take(self) -> torch.Tensor:
        """The tensor on its device, ready for the current stream."""
        if not self.has_streams:
            return self._restored()
        self.fetch()
        current = self.module.current_stream(self.device)
        current.wait_event(self.fetched)
        tensor, self.on_device = self.on_device, None  # a second walk fetches it again
        assert tensor is not None  # fetch() put it there
        tensor.record_stream(current)
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return tensor

    def fetch(self) -> None:
        """Start the copy back, once."""
        if self.on_device is not None:
            return
        back = _stream(self.device, "in")
        back.wait_event(self.copied)
        with self.module.stream(back):
            self.on_device = self._restored()
        self.fetched = back.record_event()

    def _restored(self) -> torch.Tensor:
        # the strides too, which a slice loses in a copy: some kernels round differently by them
        size, dtype = self.host.size(), self.host.dtype
        tensor = torch.empty_strided(size, self.stride, dtype=dtype, device=self.device)
        return tensor.copy_(self.host, non_blocking=True)


def _stream(device: torch.device, direction: str) -> torch.Stream:
    if (device, direction) not in _streams:
        _streams[device, direction] = torch.get_device_module(device).Stream(device)
    return _streams[device, direction]
