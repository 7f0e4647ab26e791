"""Router logits of a mixture of experts, taken from each layer as transformers takes them.

transformers records them while its whole model runs; a block runs alone, so it has hooks of its
own on the modules that the model's class names.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

ROUTER_LOGITS = "router_logits"
_FOUND: ContextVar[list[torch.Tensor] | None] = ContextVar("router logits", default=None)


def watch_routers(base_model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Put hooks on the routers of the layers; they do nothing outside of `recording_routers`."""
    specs = (getattr(base_model, "_can_record_outputs", None) or {}).get(ROUTER_LOGITS)
    if specs is None:
        return
    for spec in specs if isinstance(specs, list) else [specs]:
        target, end = getattr(spec, "target_class", spec), getattr(spec, "class_name", None)
        inside = getattr(spec, "layer_name", None)
        for name, module in (one for layer in layers for one in layer.named_modules()):
            is_meant = isinstance(target, type) and isinstance(module, target)
            if inside is not None and f".{inside.strip('.')}." not in f".{name}.":
                continue
            if is_meant or (end and name.endswith(end)):
                module.register_forward_hook(partial(_note, getattr(spec, "index", 1)))


@contextlib.contextmanager
def recording_routers(is_asked: bool) -> Iterator[list[torch.Tensor]]:
    """Yield a list that fills with the router logits of the passes inside."""
    found: list[torch.Tensor] = []
    token = _FOUND.set(found if is_asked else None)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def _note(index: int, module: nn.Module, args: tuple, output: Any) -> None:
    found = _FOUND.get()
    if found is None:
        return
    logits = output[index] if isinstance(output, tuple) else output
    if logits is not None:
        found.append(logits)
