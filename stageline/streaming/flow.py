"""Values on their way between stages, and the seeds that layers draw from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from stageline.streaming.lanes import DONE, Lane, Mark, Queue, mark_of_caller

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbours get far seeds
_SEEDS = 1 << 63


@dataclass
class Flow:
    """A value of one micro-batch between two layers, or its gradients.

    Attributes:
        value: nested tuples, lists and dicts of tensors and anything else.
        lane: whose device it lies on; None: the host.
        mark: where it is ready.
    """

    value: Any
    lane: Lane | None = None
    mark: Mark = DONE


def layer_seed(base: int, layer: int, part: int, num_parts: int) -> int:
    """What a layer's random numbers of a micro-batch begin from: the same on any lane and plan."""
    return (base + _GOLDEN * (1 + layer * num_parts + part)) % _SEEDS


def on_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The value with the function's result in place of each tensor."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def can_have(tensor: torch.Tensor) -> bool:
    """Whether it is of a dtype that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


class Fixed:
    """Tensors that travel with a value and have no gradients: masks, position embeddings.

    Without it a float mask would ask for a gradient of its own size in every layer.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self.tensors = tuple(tensors)


pytree.register_pytree_node(
    Fixed, lambda fixed: (list(fixed.tensors), None), lambda tensors, _: Fixed(tensors)
)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, Fixed)


def float_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors that can have gradients, in order."""
    return [
        leaf
        for leaf in pytree.tree_leaves(value, is_leaf=_is_fixed)
        if isinstance(leaf, torch.Tensor) and can_have(leaf)
    ]


def num_bytes(value: Any) -> int:
    """What the tensors of a value take."""
    tensors = filter(_is_tensor, pytree.tree_leaves(value))
    return sum(each.numel() * each.element_size() for each in tensors)


def detached(value: Any, *, requires_grad: bool) -> Any:
    """The same numbers as the beginning of a new graph."""

    def cut(leaf: Any) -> Any:
        if _is_fixed(leaf):
            return on_tensors(torch.Tensor.detach, leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = leaf.detach()
        return tensor.requires_grad_(requires_grad and can_have(tensor))

    return pytree.tree_map(cut, value, is_leaf=_is_fixed)


def on_host(value: Any) -> Flow:
    """What the caller gave; if it lies on a GPU after all, then where his stream is now."""
    leaves = pytree.tree_leaves(value)
    return Flow(value, mark=mark_of_caller(each for each in leaves if _is_tensor(each)))


def read_by(queue: Queue, *flows: Flow) -> None:
    """Keeps values for the queue whose work, which calls this, reads them.

    Another queue allocated them where they came from elsewhere, and would use their memory again
    as soon as the last reference is dropped: on a GPU that is long before they are read.
    """
    for flow in flows:
        for leaf in filter(_is_tensor, pytree.tree_leaves(flow.value)):
            queue.uses(leaf)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def bring(flow: Flow, lane: Lane | None) -> Flow:
    """The value on another device, or on the host for None; its copies are ordered by marks.

    From one device to another it goes through the host.
    """
    device = torch.device("cpu") if lane is None else lane.device
    here = torch.device("cpu") if flow.lane is None else flow.lane.device
    if here == device:
        return flow  # its value may not be there yet: work in a queue fills it in
    if flow.lane is not None and here.type != "cpu":
        flow = _copied(flow, flow.lane.outward, None, torch.device("cpu"))
    return flow if lane is None else _copied(flow, lane.inward, lane, device)


def _copied(flow: Flow, queue: Any, lane: Lane | None, device: torch.device) -> Flow:
    arrived = Flow(None, lane)

    def copy() -> None:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            queue.uses(tensor)
            if device.type == "cpu" and tensor.device.type == "cuda":
                landing = torch.empty_like(tensor, device="cpu", pin_memory=True)
                return landing.copy_(tensor, non_blocking=True)
            if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
                tensor = tensor.pin_memory()  # else this thread waits until the stream gets here
            return tensor.to(device, non_blocking=True)

        arrived.value = on_tensors(move, flow.value)

    queue.after(flow.mark)
    queue.run(copy)
    arrived.mark = queue.record()
    return arrived
