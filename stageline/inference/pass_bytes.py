"""What answering needs beside weights: the key-value cache, and the tensors of a pass.

The decoder runs once on the meta device, where tensors have sizes and no values. So windows,
shared heads, latent attention and states of linear layers are counted by the model's own code.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from stageline.inference.meta_model import layers_path, text_model_path
from stageline.pipeline.live_bytes import PeakBytes, tensor_bytes

DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class Load:
    """What a model is asked for at once.

    Attributes:
        rows: answers that are made together.
        length: tokens of the longest prompt and its answer.
        images: pictures that the tower sees for each row; tiles of a cut picture count each.
        image_size: side of a picture in pixels, where the model does not say.
    """

    rows: int = 1
    length: int = DEFAULT_LENGTH
    images: int = 0
    image_size: int = 1024

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        images = f" and {self.images} images" if self.images else ""
        return f"{rows} of {self.length} tokens{images}"


@dataclass(frozen=True)
class PassBytes:
    """Of each layer.

    Attributes:
        cache: keys, values and states when the answer is complete. Its last token is in no cache.
        beyond: what a cache with a window holds of a long prompt until the first step.
        workspace: the fullest moment beside weights and caches, of the prompt or of a step.
    """

    cache: tuple[int, ...]
    beyond: tuple[int, ...]
    workspace: tuple[int, ...]


def pass_bytes(model: nn.Module, load: Load, *, image_tokens: int = 0) -> PassBytes:
    """Runs the decoder of a model that lies on the meta device.

    Args:
        image_tokens: of a row, where layers look at images themselves.
    """
    text_model = model.get_submodule(text_model_path(model))
    layers = list(model.get_submodule(layers_path(model)))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    peaks = [0] * len(layers)  # a layer that looks at images may be left out where there are none
    watch = PeakBytes(torch.device("meta"))
    with on_meta(watch), _light_experts(model), _laps(layers, watch, peaks):
        inputs = _inputs(model, load, image_tokens)
        text_model(**inputs, past_key_values=cache, use_cache=True)
    tensors = [layer_tensors(layer) for layer in cache.layers[: len(layers)]]
    tensors += [[]] * (len(layers) - len(tensors))  # layers that share the cache of others
    kept = [tensor_bytes(own) for own in tensors]
    held = [sum(tensor.untyped_storage().nbytes() for tensor in own) for own in tensors]
    # a step joins old and new keys: for a moment both are there
    workspace = [
        max(peak - before, own // 2, 0)
        for own, before, peak in zip(kept, itertools.accumulate(held), peaks, strict=True)
    ]
    beyond = [all_of_it - own for all_of_it, own in zip(held, kept, strict=True)]
    return PassBytes(tuple(kept), tuple(beyond), tuple(workspace))


@contextmanager
def on_meta(watch: PeakBytes) -> Iterator[None]:
    """Makes tensors without values, and counts them."""
    with torch.no_grad(), torch.device("meta"), _FusedAttention(), watch.watch():
        yield


def layer_tensors(layer: object) -> list[torch.Tensor]:
    """What a layer of a cache keeps, whatever kind it is of."""
    found, waiting = [], [*vars(layer).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor) and value.dim() > 0:  # sizes of windows are no cache
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return found


def _inputs(model: nn.Module, load: Load, image_tokens: int) -> dict[str, Any]:
    """Hidden states of the prompt: made here, so that they count."""
    config = model.config.get_text_config(decoder=True)
    num_tokens = max(1, load.length - 1)
    inputs: dict[str, Any] = {
        "inputs_embeds": torch.empty(load.rows, num_tokens, config.hidden_size, dtype=model.dtype),
        "position_ids": torch.empty(load.rows, num_tokens, dtype=torch.long),
        "attention_mask": None,
    }
    if load.rows > 1:  # rows of different length: none can do without a mask
        shape = (load.rows, 1, num_tokens, num_tokens)
        inputs["attention_mask"] = torch.empty(shape, dtype=torch.bool)
    if image_tokens and getattr(config, "cross_attention_layers", None):
        shape = (load.rows, image_tokens, config.hidden_size)
        inputs["cross_attention_states"] = torch.empty(shape, dtype=model.dtype)
    return inputs


@contextmanager
def _laps(layers: Sequence[nn.Module], watch: PeakBytes, peaks: list[int]) -> Iterator[None]:
    """Notes the peak within each layer."""

    def before(*_: object) -> None:
        watch.lap()

    def after(index: int, *_: object) -> None:
        peaks[index] = watch.lap()

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    handles += [
        layer.register_forward_hook(functools.partial(after, index))
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _FusedAttention(TorchFunctionMode):
    """Counts attention as the kernels of a GPU do it: scores never lie in memory as a whole."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # the kernels add numbers
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


@contextmanager
def _light_experts(model: nn.Module) -> Iterator[None]:
    """Which rows an expert gets depends on values: here all go through all that they chose."""
    changed = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and not isinstance(module, nn.ModuleList)
    ]
    for module in changed:
        module.forward = functools.partial(_pass_experts, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _pass_experts(
    experts: nn.Module, hidden: torch.Tensor, *routed: torch.Tensor, **_: object
) -> torch.Tensor:
    """Makes what passes through experts make, all of it at once."""
    chosen = next((item for item in routed if item.dtype in (torch.long, torch.int)), None)
    num_chosen = 1 if chosen is None else chosen.shape[-1]
    num_rows = hidden.numel() // hidden.shape[-1] * num_chosen
    widths = [sum(p.shape[-2:]) for p in experts.parameters(recurse=False) if p.dim() == 3]
    held = hidden.new_empty((num_rows, sum(widths)))
    made = torch.empty_like(hidden)
    del held
    return made
