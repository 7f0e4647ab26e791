"""Router logits of a mixture of experts, and the tokens that each expert gets.

transformers records logits while its whole model runs; a block runs alone, so it has hooks of its
own on the modules that the model's class names. Tokens are counted where experts are called.

Shapes: E experts, N = B x T tokens of a micro-batch, K experts of a token.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from stageline.modules.expert_weight import num_experts

ROUTER_LOGITS = "router_logits"
_FOUND: ContextVar[list[torch.Tensor] | None] = ContextVar("router logits", default=None)
_MASK: ContextVar[torch.Tensor | None] = ContextVar("tokens that are counted", default=None)


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


class ExpertTokens:
    """Counts of the tokens that each expert got, summed on the device of the experts.

    A token counts once for each expert that its router chose, padding counts nowhere: the counts of
    a layer add up to K times the tokens. Experts without choices [N, K] are counted if they get
    [E * N, .], in which a row of zeros was not chosen.

    Args:
        models: their experts get hooks, which do nothing outside of `counting_tokens`; not those
            in compiled layers, whose graph a hook would break.

    Attributes:
        sums: by module and device; cleared, the count starts again.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.sums: dict[tuple[str, torch.device], torch.Tensor] = {}
        compiled = " "  # the beginning of names in the last compiled layer
        for name, module in (one for model in models for one in model.named_modules()):
            if hasattr(module.forward, "_torchdynamo_orig_callable"):
                compiled = f"{name}."
            if not name.startswith(compiled) and (count := num_experts(module)):
                hook = partial(self._add, name.replace(".lora_module", ""), count)
                module.register_forward_pre_hook(hook, with_kwargs=True)

    def read(self) -> dict[str, torch.Tensor]:
        """Return tokens [E] by the name of the experts' module; the host waits for devices."""
        return summed((name, sums.cpu()) for (name, _), sums in self.sums.items())

    def _add(self, name: str, count: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = _MASK.get()
        if mask is None:
            return
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        is_real_N = mask.flatten() != 0
        chosen = next((one for one in given if not one.is_floating_point()), None)
        if chosen is not None:
            chosen_NK = chosen.reshape(len(is_real_N), -1)
        elif given and given[0].numel() == count * len(is_real_N) * given[0].shape[-1]:
            chosen_EN = given[0].detach().unflatten(0, (count, -1)).flatten(1, -2).any(-1)
        else:  # experts that all tokens share
            return
        key = name, given[0].device
        if key not in self.sums:
            self.sums[key] = torch.zeros(count, dtype=torch.int64, device=given[0].device)
        if chosen is None:
            self.sums[key] += (chosen_EN & is_real_N).sum(1)
            return
        # beyond E are identities in the place of experts
        adds_NK = is_real_N[:, None] & (chosen_NK < count)
        index = chosen_NK.clamp(max=count - 1).flatten().long()
        self.sums[key].scatter_add_(0, index, adds_NK.flatten().long())


def summed(counts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sum of all tensors of a name."""
    found: dict[str, torch.Tensor] = {}
    for name, own in counts:
        found[name] = found[name] + own if name in found else own
    return found


@contextlib.contextmanager
def counting_tokens(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, `ExpertTokens` count what a model in training does with a micro-batch."""
    token = _MASK.set(batch.get("attention_mask") if model.training else None)
    try:
        yield
    finally:
        _MASK.reset(token)
