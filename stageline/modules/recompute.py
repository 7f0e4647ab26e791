"""Activation checkpointing: a call keeps its inputs alone, and its activations are made anew.

As torch.utils.checkpoint without reentrance, with one difference: what was made anew is kept until
the graph lets go of it, not until it was read once. A zero-bubble schedule walks one graph twice,
for the gradient of the inputs and later for that of the weights; torch's own function would run the
layer once more for each weight, and refuses the second walk where some outputs were saved.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from stageline.modules.random_state import RandomState

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
    def forward(ctx: object, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
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
        self.inputs = _KeepInputs.apply(anchor, *(tensor.detach() for tensor in tensors)).grad_fn
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
            self._run_again()
            self.is_done = True
            self.inputs = self.others = None  # all that they are needed for is made
        if slot.tensor is None:
            raise RecomputeError(_MISMATCH.format(f"{self.num_made} tensors", len(self.slots)))
        return slot.tensor

    def _run_again(self) -> None:
        args = list(self.others)
        kept = self.inputs.saved_tensors
        for place, tensor, needs_grad in zip(self.places, kept, self.needs_grad, strict=True):
            args[place] = tensor.detach().requires_grad_(needs_grad)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._fill, lambda tensor: tensor)
        with torch.enable_grad(), self.random_state.replayed(), self.again, hooks:
            try:
                self.function(*args)
            except _AllMade:
                pass

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


_MISMATCH = (
    "a checkpointed layer saved {} in its second run where the first one saved {}: its forward "
    "must do the same each time. Look for state that it changes, or drop --gradient-checkpointing."
)


def recompute(
    function: Callable, *args: object, contexts: Contexts | None = None, **kwargs: object
) -> object:
    """Calls `function(*args, **kwargs)` without keeping what its backward pass needs.

    Dropout draws the same numbers again. Tensors among `args` may be offloaded while they wait;
    those among `kwargs` are held as they are.

    Args:
        contexts: makes the context managers around the first and the second run.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    first, again = contexts() if contexts is not None else (nullcontext(), nullcontext())
    frame = _Frame(lambda *tensors: function(*tensors, **kwargs), args, again)
    with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack), first:
        return function(*args, **kwargs)
