"""A cut-down copy of any transformers configuration: what a split is tried on before the real one.

What makes a family special stays: multipliers, caps, flags, the kinds of layers and what they have
to do with each other. What makes it large goes, by the name of the field: depth, width, heads,
experts, vocabulary, towers. Rules by name serve families that nobody has seen yet; what no such
rule can know stands in `shrink_rules.py`, with a reason each.
"""

import re
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig

from stageline.checking.shrink_rules import (
    DEPTHS,
    EXCEPTIONS,
    GRID,
    HEAD_DIM,
    LEAST_HEAD_DIM,
    PATCH,
    RULES,
    SECTIONS,
    TOWER_DEPTH,
    FieldValues,
    LayerKinds,
    Sizes,
)
from stageline.errors import UserError
from stageline.model_folder import is_token, parts_of, special_tokens, walk_config


def shrink_config(config: PretrainedConfig, *, num_layers: int) -> PretrainedConfig:
    """A copy of `config` that a CPU runs in milliseconds.

    Args:
        num_layers: of the language model; with `layer_period(config)` or more, every kind of layer
            is among them.

    Raises:
        UserError: the class of the configuration refuses the copy.
    """
    sizes = Sizes(num_layers, _head_dim(config), _token_places(config))
    text = config.get_text_config(decoder=True)
    try:
        small = _shrink_part(config, sizes, text if _holds(config, text) else config)
        for change in EXCEPTIONS.get(config.model_type, ()):
            change(small, sizes)
        return type(config).from_dict(small)
    except Exception as error:  # whatever the checks of some hundred classes raise
        raise UserError(
            f"{config.model_type} could not be cut down to {num_layers} layers: "
            f"{type(error).__name__}: {' '.join(str(error).split())}. Fields of its configuration "
            "belong together in a way that no rule by name knows: add the family to "
            "stageline/checking/shrink_rules.py."
        ) from error


def layer_period(config: PretrainedConfig) -> int:
    """In how many layers of a cut-down copy every kind of layer appears; 1: all are alike."""
    return LayerKinds(config.get_text_config(decoder=True).to_dict()).period


# -- the parts of a configuration ---------------------------------------------------------------


def _holds(config: PretrainedConfig, part: PretrainedConfig) -> bool:
    return config is part or any(_holds(one, part) for one in parts_of(config).values())


def _shrink_part(
    config: PretrainedConfig, sizes: Sizes, text: PretrainedConfig, *, in_text: bool = False
) -> FieldValues:
    told, parts = deepcopy(config.to_dict()), parts_of(config)
    is_text = in_text or config is text
    kinds = LayerKinds(told)
    depth = sizes.num_layers if is_text else min(kinds.depth, TOWER_DEPTH)
    small = told | (kinds.fewer(depth) if kinds.depth else {})
    for name, value in small.items():
        if name in parts:
            small[name] = _shrink_part(parts[name], sizes, text, in_text=is_text)
        elif name in DEPTHS and isinstance(value, int):
            small[name] = _scaled_depth(value, kinds.depth, depth, is_text)
        elif name == "per_layer_config" and value:
            small[name] = {at: _shrink_fields(own, told | own, sizes) for at, own in value.items()}
        elif name in kinds.lists and not isinstance(value, str):
            small[name] = _shrink_list(name, value, told, sizes)
    done = {*parts, *kinds.lists, *kinds.indices, *kinds.sources, "per_layer_config", *DEPTHS}
    rest = {name: value for name, value in small.items() if name not in done}
    small |= _shrink_fields(rest, told, sizes)
    return small | _shrink_tower_indices(told, depth)


def _scaled_depth(value: int, old: int, new: int, is_text: bool) -> int:
    """Layers of one stack: twice as many as of another one stay twice as many."""
    if not is_text:
        return min(value, TOWER_DEPTH)
    return max(1, round(new * value / old)) if old % value == 0 or value % old == 0 else 2


# -- one field ----------------------------------------------------------------------------------


def _shrink_fields(fields: FieldValues, told: FieldValues, sizes: Sizes) -> FieldValues:
    return {name: _shrink(name, value, told, sizes) for name, value in fields.items()}


def _shrink_list(name: str, values: list, told: FieldValues, sizes: Sizes) -> list:
    """One entry a layer: different numbers stay different, and multiples of the smallest."""
    numbers = {one for one in values if isinstance(one, int) and not isinstance(one, bool)}
    small = {
        one: _shrink(name, one, told, sizes)
        * (rank if _shrink(name, one, told, sizes) != one else 1)
        for rank, one in enumerate(sorted(numbers), 1)
    }
    return [small.get(one, one) if type(one) is int else one for one in values]


def _shrink(name: str, value: Any, told: FieldValues, sizes: Sizes) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name.startswith("rope_") and isinstance(value, dict):
        return _shrink_rope(value, told, sizes)
    if name == "image_grid_pinpoints":
        return _shrink_pinpoints(value, told)
    if isinstance(value, list | tuple):
        return [_shrink(name, one, told, sizes) for one in value]
    if isinstance(value, int) and is_token(name):
        return sizes.ids.get(value, value)
    if isinstance(value, float):
        return 0.0 if re.fullmatch(DROPOUT, name) else value
    if isinstance(value, int):
        rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)
        return value if rule is None else rule(value, told, sizes)
    return value


DROPOUT = r".*(dropout|drop|drop_?path|layerdrop|jitter|noise)(_prob|_rate|_p|_noise|_eps)?|.*pdrop"


def _token_places(config: PretrainedConfig) -> dict[int, int]:
    """Small ids for special tokens: different ones stay different."""
    known = sorted(one for one in special_tokens(config) if one > 2)
    return {one: place for place, one in enumerate(known, 3)} | {0: 0, 1: 1, 2: 2}


# -- rotary positions ---------------------------------------------------------------------------


def _head_dim(config: PretrainedConfig) -> int:
    """The least size of a head in which all rotary positions find room."""
    needed = LEAST_HEAD_DIM.get(config.model_type, HEAD_DIM)
    for told in walk_config(config):
        for rope in _ropes(told) if "kv_lora_rank" not in told else ():
            part = _rotary_part(rope, told)
            axes = len(_sections(rope, told)) or 1
            while round(needed * part) < 2 * axes or needed * part % 2:
                needed *= 2
                if needed > 256:
                    return HEAD_DIM
    return needed


def _ropes(told: FieldValues) -> list[FieldValues]:
    """The rotary parameters of a configuration: one set, or one for each kind of layer."""
    rope = told.get("rope_parameters") or told.get("rope_scaling")
    if not isinstance(rope, dict):
        return [{}]
    inner = [one for one in rope.values() if isinstance(one, dict)]
    return inner or [rope]


def _rotary_part(rope: FieldValues, told: FieldValues) -> float:
    part = rope.get("partial_rotary_factor") or told.get("partial_rotary_factor")
    return part or told.get("rotary_pct") or 1.0


def _sections(rope: FieldValues, told: FieldValues) -> list[int]:
    own = [value for name, value in rope.items() if name.endswith("_section") and value]
    return own[0] if own else SECTIONS.get(told.get("model_type", ""), [])


def _shrink_rope(rope: FieldValues, told: FieldValues, sizes: Sizes) -> FieldValues:
    if any(isinstance(one, dict) for one in rope.values()):
        return {
            name: _shrink_rope(one, told, sizes) if isinstance(one, dict) else one
            for name, one in rope.items()
        }
    size = round(sizes.head_dim * _rotary_part(rope, told)) // 2
    small = dict(rope)
    if told.get("model_type") in SECTIONS:
        rope = {"mrope_section": SECTIONS[told["model_type"]]} | rope
    for name, value in rope.items():
        if name.endswith("_section") and isinstance(value, list):
            small[name] = _shares(value, size)
        elif name in ("long_factor", "short_factor"):
            small[name] = value[:size]
    return small


def _shares(old: list[int], size: int) -> list[int]:
    """`size` in as many shares; axes with equal shares keep equal ones."""
    least, rest = divmod(size, len(old))
    lone = next((place for place, one in enumerate(old) if old.count(one) == 1), 0)
    return [least + rest * (place == lone) for place in range(len(old))]


# -- towers -------------------------------------------------------------------------------------

TOWER_INDICES = (
    *("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes"),
    *("intermediate_layers_indices", "out_indices", "vision_feature_layer"),
)


def _shrink_tower_indices(told: FieldValues, depth: int) -> FieldValues:
    """Indices of blocks of a tower: as many as fit, from the front or from the back."""
    small: FieldValues = {}
    for name in TOWER_INDICES:
        value = told.get(name)
        if isinstance(value, list):
            small[name] = _few_indices(value, min(depth or TOWER_DEPTH, TOWER_DEPTH))
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = max(-TOWER_DEPTH, min(value, TOWER_DEPTH - 1))
    return small


def _shrink_pinpoints(sizes: list, told: FieldValues) -> list:
    """Sizes of pictures in whole tiles, of which a picture has two a side at most."""
    tile = (told.get("vision_config") or {}).get("image_size") or min(map(min, sizes))
    tile = tile if isinstance(tile, int) else tile[0]
    tiles = {tuple(max(1, min(side // tile, 2)) for side in size) for size in sizes}
    return [[side * PATCH * GRID for side in one] for one in sorted(tiles)]


def _few_indices(values: list[int], depth: int) -> list[int]:
    if any(value < 0 for value in values):
        return [max(-depth, min(value, depth - 1)) for value in values]
    count = min(len(values), depth - 1)
    return list(range(depth - count, depth))
