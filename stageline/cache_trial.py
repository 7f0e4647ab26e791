"""Finds by a trial whether a model answers on keys and values that it keeps, and how it is told to.

A signature says little of that: the library renames its arguments, a forward with `**kwargs` takes
any name and may do nothing with it, and some models keep more than keys and values. So a cut-down
copy answers both ways.

Shapes: B rows, T tokens.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from stageline.model_folder import is_of_library, special_tokens
from stageline.shrink import layer_period, shrink_config

SPREAD = 0.1  # of the noise on all weights: those that start at 0 or 1 hide a swap or a loss
NAMES = ("cache", "past_key_values")  # the newest first: the library warns of what it renamed
LENGTHS = (3, 1)  # tokens of two rows before the last one; no window of a copy is as short
TOLERANCE = 1e-3  # of the largest number
_FOUND: dict[tuple[str, type, str], Any] = {}  # (trial, class, configuration) -> what it found
T = TypeVar("T")


@torch.no_grad()
def randomise(whole: nn.Module) -> None:
    """Adds noise to all weights, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator).to(parameter))
            parameter.requires_grad_(True)


def small_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class, cut down, on the CPU with random weights in float32.

    Raises:
        Exception: whatever the library raises where the configuration cannot be cut down.
    """
    small = shrink_config(model.config, num_layers=max(2, layer_period(model.config)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        copy = type(model)._from_config(small, dtype=torch.float32, attn_implementation="eager")
    randomise(copy)
    return copy.eval()


def cache_name(model: PreTrainedModel) -> str | None:
    """By which keyword the forward takes a cache of keys and values; None: by no one.

    Nor where keys and values are not all that it has to remember of the tokens so far: layers keep
    a state (Mamba), or positions are counted from another number than 0 (RoBERTa).

    Args:
        model: any one of its class and configuration, also on meta.
    """
    return _once(_tried_name, model)


def generates_alike(model: PreTrainedModel) -> bool:
    """Whether transformers' `generate` answers with its cache as it does without.

    Not where a forward takes the cache among other keywords and does nothing with it: `generate`
    then hands it the last token alone. Prints so; a model that cannot be tried is taken to be
    right.
    """
    return _once(_tried_generate, model)


def masks_padding(model: PreTrainedModel) -> bool:
    """Whether a row that is padded on the left is answered as it is alone.

    Models of transformers are taken to do so; one that cannot be tried is not.
    """
    return is_of_library(model) or _once(_tried_padding, model)


def _once(trial: Callable[[PreTrainedModel], T], model: PreTrainedModel) -> T:
    key = trial.__name__, type(model), model.config.to_json_string(use_diff=False)
    if key not in _FOUND:
        # a caller may measure on meta, where a default device is set
        with warnings.catch_warnings(), torch.no_grad(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            _FOUND[key] = trial(model)
    found: T = _FOUND[key]
    return found


def _tried_padding(model: PreTrainedModel) -> bool:
    return bool(_steps_agree(model, size=2))


def _tried_generate(model: PreTrainedModel) -> bool:
    is_alike = _steps_agree(model, use_cache=True)
    if is_alike is False:
        print(
            f"{type(model).__name__} answers otherwise with transformers' cache than without: "
            "use_cache is off, and each token of an answer reads its whole row",
            file=sys.stderr,
        )
    return is_alike is not False


def _steps_agree(model: PreTrainedModel, *, size: int = 0, use_cache: bool = False) -> bool | None:
    """Whether two new tokens have the logits that they have without padding and without a cache.

    Args:
        size: places of padding before the row.

    Returns:
        None: no copy can be tried. An error of the changed way alone counts as False.
    """

    def steps(size: int, use_cache: bool) -> tuple[torch.Tensor, ...]:
        padded_1T = nn.functional.pad(ids_T, (size, 0), value=3)[None]
        found: tuple[torch.Tensor, ...] = copy.generate(
            padded_1T,
            attention_mask=(torch.arange(padded_1T.shape[1]) >= size).long()[None],
            do_sample=False,
            max_new_tokens=2,
            use_cache=use_cache,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits
        return found

    try:
        copy: Any = small_copy(model)
        copy.generation_config = GenerationConfig(pad_token_id=0)
        ids_T = _rows(copy)[0][:-1]  # as few as the keys that a copy chooses at least
        expected = steps(0, False)
    except Exception:  # of any of some hundred classes
        return None
    try:
        return all(map(_is_close, steps(size, use_cache), expected))
    except Exception:  # the real one would raise it, too
        return False


def _tried_name(model: PreTrainedModel) -> str | None:
    try:
        copy = small_copy(model)
        rows = _rows(copy)
        wholes = [_last(copy, input_ids=row[None], use_cache=False) for row in rows]
    except Exception as error:  # of any of some hundred classes
        print(
            f"whether {type(model).__name__} answers on a cache could not be tried on a cut-down "
            f"copy ({type(error).__name__}: {' '.join(str(error).split())[:200]}): each token of "
            "an answer reads its whole row",
            file=sys.stderr,
        )
        return None
    for name in NAMES:
        try:
            found = _with_cache(copy, rows, name)
        except Exception:  # an unknown keyword, layers that want another cache
            continue
        if all(_is_close(one, whole) for one, whole in zip(found, wholes, strict=True)):
            return name
    return None


def _rows(copy: PreTrainedModel) -> list[torch.Tensor]:
    special = special_tokens(copy.config)
    ids = torch.tensor([one for one in range(3, 40) if one not in special])
    return [ids[: length + 1].roll(length) for length in LENGTHS]


def _with_cache(copy: PreTrainedModel, rows: list[torch.Tensor], name: str) -> torch.Tensor:
    """Of each row, what the last token's place gives: after one pass over all before it."""
    width = max(LENGTHS)
    ids_BT = torch.stack(
        [nn.functional.pad(row, (width + 1 - len(row), 0), value=3) for row in rows]
    )
    starts_B1 = torch.tensor([[width - length] for length in LENGTHS])
    mask_BT = (torch.arange(width + 1) >= starts_B1).long()
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    # as stages keep it: all columns in all layers. A configuration would choose windows and states
    cache: dict[str, Any] = {name: DynamicCache(), "use_cache": True}
    for new in (slice(0, width), slice(width, width + 1)):
        found = _last(
            copy,
            input_ids=ids_BT[:, new],
            attention_mask=mask_BT[:, : new.stop],
            position_ids=position_BT[:, new],
            **cache,
        )
    return found[:, None]


def _last(copy: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    if getattr(copy.config.get_text_config(decoder=True), "use_bidirectional_attention", None):
        inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])  # no prefix: an answer
    return copy(**inputs)[0][:, -1]


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    apart = (found - expected).abs().max()
    return bool(apart <= TOLERANCE * expected.abs().max())
