"""Find by a trial whether a model can decode with a key-value cache, and the argument of the cache.

A signature does not tell: a forward with `**kwargs` may ignore the cache, and some models keep more
than keys and values. So a scaled-down copy answers both ways. Shapes: B rows, T tokens.
"""

import sys
import warnings
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from stageline.model_folder import special_tokens
from stageline.shrink import layer_period, shrink_config

SPREAD = 0.1  # noise on all weights: weights of 0 or 1 hide a swapped or lost one
NAMES = ("cache", "past_key_values")  # newest first: transformers warns about the old name
LENGTHS = (3, 1)  # tokens of two rows before the last one; no window of a copy is as short
TOLERANCE = 1e-3  # share of the largest number
_FOUND: dict[tuple[type, str], str | None] = {}  # (class, configuration) -> the keyword


@torch.no_grad()
def randomise(whole: nn.Module) -> None:
    """Add noise to all weights, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator).to(parameter))
            parameter.requires_grad_(True)


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the keyword by which the forward takes a cache of keys and values, or None.

    It is None, too, where keys and values are not all that it keeps of the tokens so far: layers
    have a state (Mamba), or positions are counted from another number than 0 (RoBERTa).
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _FOUND:
        # a caller may measure on meta, where a default device is set
        with warnings.catch_warnings(), torch.no_grad(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            _FOUND[key] = _tried_name(model)
    return _FOUND[key]


def _tried_name(model: PreTrainedModel) -> str | None:
    try:
        # a scaled-down model of the same class, on the CPU with random float32 weights
        small = shrink_config(model.config, num_layers=max(2, layer_period(model.config)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            copy = type(model)._from_config(small, dtype=torch.float32, attn_implementation="eager")
        randomise(copy)
        copy.eval()
        special = special_tokens(copy.config)
        ids = torch.tensor([one for one in range(3, 40) if one not in special])
        rows = [ids[: length + 1].roll(length) for length in LENGTHS]
        wholes = [_last(copy, input_ids=row[None], use_cache=False) for row in rows]
    except Exception as error:  # some hundred classes can fail in any way
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"{type(model).__name__} decodes without a cache: {why}", file=sys.stderr)
        return None
    for name in NAMES:
        try:
            found = _with_cache(copy, rows, name)
        except Exception:  # an unknown keyword, or layers that need another cache
            continue
        pairs = zip(found, wholes, strict=True)
        if all((one - whole).abs().max() <= TOLERANCE * whole.abs().max() for one, whole in pairs):
            return name
    return None


def _with_cache(copy: PreTrainedModel, rows: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return the output at the last token of each row, after one pass over all before it."""
    width = max(LENGTHS)
    ids_BT = nn.utils.rnn.pad_sequence(rows, True, padding_value=3, padding_side="left")
    starts_B1 = torch.tensor([[width - length] for length in LENGTHS])
    mask_BT = (torch.arange(width + 1) >= starts_B1).long()
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    # Stages keep all columns in all layers, too. A configuration would choose windows and states.
    cache: dict[str, Any] = {name: DynamicCache(), "use_cache": True}
    for new in (slice(0, width), slice(width, width + 1)):
        inputs = {"input_ids": ids_BT[:, new], "position_ids": position_BT[:, new]}
        found = _last(copy, attention_mask=mask_BT[:, : new.stop], **inputs, **cache)
    return found[:, None]


def _last(copy: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    if getattr(copy.config.get_text_config(decoder=True), "use_bidirectional_attention", None):
        inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])  # no prefix: an answer
    return copy(**inputs)[0][:, -1]
