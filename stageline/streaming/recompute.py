"""Keep values of the forward pass of a layer for its recomputation.

A choice that the recomputation has to repeat (experts of a router, a count that the host waits
for) is saved in forward and looked up when the layer runs again:

    if doing_recompute():
        (experts,) = get_recompute_data()
    else:
        experts = choose(hidden)
        save_for_recompute(experts)

Outside of the engine nothing is recomputed and what is saved is dropped, so that such a layer runs
anywhere. What is saved takes no part in gradients, and stays where it is.
"""

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass
class _Running:
    """A layer on a micro-batch.

    Attributes:
        kept: what was saved, of all layers and micro-batches of a call.
    """

    kept: dict[Hashable, tuple]
    key: Hashable
    is_recomputed: bool


_running: ContextVar[_Running | None] = ContextVar("layer that runs", default=None)


@contextlib.contextmanager
def running(kept: dict[Hashable, tuple], key: Hashable, *, is_recomputed: bool) -> Iterator[None]:
    """While a layer runs on a micro-batch; `key` is both. After it ran again its data are gone."""
    token = _running.set(_Running(kept, key, is_recomputed))
    try:
        yield
    finally:
        _running.reset(token)
        if is_recomputed:
            kept.pop(key, None)


def doing_recompute() -> bool:
    """Whether the layer that runs has run on these inputs before."""
    now = _running.get()
    return now is not None and now.is_recomputed


def save_for_recompute(*data: Any) -> None:
    """Keep data for the recomputation of this layer on this micro-batch; once in a layer."""
    now = _running.get()
    if now is None:
        return
    if now.is_recomputed or now.key in now.kept:
        when = "in a recomputation" if now.is_recomputed else "twice by one layer"
        raise RuntimeError(
            f"save_for_recompute was called {when}. Ask doing_recompute() first, and save "
            "everything in one call."
        )
    now.kept[now.key] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, data)


def get_recompute_data() -> tuple:
    """Return the values that this layer saved on this micro-batch."""
    now = _running.get()
    if now is None or not now.is_recomputed or now.key not in now.kept:
        raise RuntimeError(
            "get_recompute_data was called where nothing is kept. Call it in a recomputation "
            "(doing_recompute()) of a layer that called save_for_recompute."
        )
    return now.kept[now.key]
