"""A cut-down copy of any transformers configuration: what a split is tried on before the real one.

What makes a family special stays: multipliers, caps, flags, the kinds of layers and what they have
to do with each other. What makes it large goes, by the name of the field: depth, width, heads,
experts, vocabulary, towers. Rules by name serve families that nobody has seen yet; what no such
rule can know stands in `shrink_exceptions.py`, with a reason each.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from stageline.checking.layer_kinds import DEPTHS, LayerKinds, depth_of
from stageline.checking.shrink_exceptions import EXCEPTIONS
from stageline.errors import UserError

Told = dict[str, Any]
NUM_HEADS = 4
HEAD_DIM = 8  # more where rotary positions on a part of a head, or of three axes, ask for it
VOCABULARY = 128
MAX_POSITIONS = 128
TOWER_DEPTH = 4
PATCH, GRID = 4, 4  # pixels of a patch, patches of a row of a picture


@dataclass(frozen=True)
class Sizes:
    """What all parts of a copy share: one width, so that any two of them fit together."""

    num_layers: int
    head_dim: int
    ids: Mapping[int, int]  # special token -> its place in the small vocabulary

    @property
    def width(self) -> int:
        return NUM_HEADS * self.head_dim


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
            "stageline/checking/shrink_exceptions.py."
        ) from error


def layer_period(config: PretrainedConfig) -> int:
    """In how many layers of a cut-down copy every kind of layer appears; 1: all are alike."""
    return LayerKinds(config.get_text_config(decoder=True).to_dict()).period


def special_tokens(config: PretrainedConfig) -> frozenset[int]:
    """The ids of all tokens that are not text: padding, ends, pictures, sounds."""
    return frozenset(
        one
        for told in _walk(config)
        for name, value in told.items()
        if _is_token(name)
        for one in (value if isinstance(value, list) else [value])
        if isinstance(one, int)
    )


# -- the parts of a configuration ---------------------------------------------------------------


def _parts(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    found = {name: config.__dict__.get(name) for name in config.to_dict()}
    return {name: part for name, part in found.items() if isinstance(part, PretrainedConfig)}


def _holds(config: PretrainedConfig, part: PretrainedConfig) -> bool:
    return config is part or any(_holds(one, part) for one in _parts(config).values())


def _walk(config: PretrainedConfig) -> Iterator[Told]:
    """The fields of a configuration, and of those inside it."""
    parts = _parts(config)
    yield {name: value for name, value in config.to_dict().items() if name not in parts}
    for part in parts.values():
        yield from _walk(part)


def _shrink_part(
    config: PretrainedConfig, sizes: Sizes, text: PretrainedConfig, *, in_text: bool = False
) -> Told:
    told, parts = deepcopy(config.to_dict()), _parts(config)
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
            small[name] = {at: _shrink_fields(own, told, sizes) for at, own in value.items()}
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


def _shrink_fields(fields: Told, told: Told, sizes: Sizes) -> Told:
    return {name: _shrink(name, value, told, sizes) for name, value in fields.items()}


def _shrink_list(name: str, values: list, told: Told, sizes: Sizes) -> list:
    """One entry a layer: different numbers stay different, and multiples of the smallest."""
    numbers = {one for one in values if isinstance(one, int) and not isinstance(one, bool)}
    small = {
        one: _shrink(name, one, told, sizes) * (rank if _shrink(name, one, told, sizes) != one else 1)
        for rank, one in enumerate(sorted(numbers), 1)
    }
    return [small.get(one, one) if type(one) is int else one for one in values]


def _shrink(name: str, value: object, told: Told, sizes: Sizes) -> object:
    if isinstance(value, bool) or value is None:
        return value
    if name.startswith("rope_") and isinstance(value, dict):
        return _shrink_rope(value, told, sizes)
    if isinstance(value, list | tuple) and value and not _is_rope_list(name):
        return [_shrink(name, one, told, sizes) for one in value]
    if isinstance(value, int) and _is_token(name):
        return sizes.ids.get(value, value)
    if isinstance(value, float):
        return 0.0 if re.fullmatch(DROPOUT, name) else value
    if isinstance(value, int):
        rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)
        return value if rule is None else rule(value, told, sizes)
    return value


def _is_rope_list(name: str) -> bool:
    return name in ("image_grid_pinpoints",)


def _is_token(name: str) -> bool:
    return bool(re.fullmatch(TOKEN, name)) and "layer" not in name


TOKEN = r".*(token_ids?|token_index|_start_id|_end_id|newline_id|patch_id|(pad|eos|bos|unk|mask)_index)"
DROPOUT = r".*(dropout|drop|drop_?path|layerdrop|jitter|noise)(_prob|_rate|_p|_noise|_eps)?|.*pdrop"


def _token_places(config: PretrainedConfig) -> dict[int, int]:
    """Small ids for special tokens: different ones stay different."""
    known = sorted(one for one in special_tokens(config) if one > 2)
    return {one: place for place, one in enumerate(known, 3)} | {0: 0, 1: 1, 2: 2}


# -- rotary positions ---------------------------------------------------------------------------


def _head_dim(config: PretrainedConfig) -> int:
    """The least size of a head in which all rotary positions find room."""
    needed = HEAD_DIM
    for told in _walk(config):
        for rope in _ropes(told):
            part = _rotary_part(rope, told)
            axes = len(_sections(rope)) or 1
            while round(needed * part) < 2 * axes or needed * part % 2:
                needed *= 2
                if needed > 256:
                    return HEAD_DIM
    return needed


def _ropes(told: Told) -> list[Told]:
    """The rotary parameters of a configuration: one set, or one for each kind of layer."""
    rope = told.get("rope_parameters") or told.get("rope_scaling")
    if not isinstance(rope, dict):
        return [{}]
    inner = [one for one in rope.values() if isinstance(one, dict)]
    return inner or [rope]


def _rotary_part(rope: Told, told: Told) -> float:
    part = rope.get("partial_rotary_factor") or told.get("partial_rotary_factor")
    return part or told.get("rotary_pct") or 1.0


def _sections(rope: Told) -> list[int]:
    return next((v for k, v in rope.items() if k.endswith("_section") and isinstance(v, list)), [])


def _shrink_rope(rope: Told, told: Told, sizes: Sizes) -> Told:
    if any(isinstance(one, dict) for one in rope.values()):
        return {
            name: _shrink_rope(one, told, sizes) if isinstance(one, dict) else one
            for name, one in rope.items()
        }
    is_latent = bool(told.get("qk_rope_head_dim"))
    size = round((HEAD_DIM if is_latent else sizes.head_dim) * _rotary_part(rope, told)) // 2
    small = dict(rope)
    for name, value in rope.items():
        if name.endswith("_section") and isinstance(value, list):
            least, rest = divmod(size, len(value))
            small[name] = [least + (place < rest) for place in range(len(value))]
        elif name in ("long_factor", "short_factor"):
            small[name] = value[:size]
    return small


# -- towers -------------------------------------------------------------------------------------

TOWER_INDICES = (
    *("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes"),
    *("intermediate_layers_indices", "out_indices", "vision_feature_layer"),
)


def _shrink_tower_indices(told: Told, depth: int) -> Told:
    """Indices of blocks of a tower: as many as fit, from the front or from the back."""
    small: Told = {}
    for name in TOWER_INDICES:
        value = told.get(name)
        if isinstance(value, list):
            small[name] = _few_indices(value, min(depth or TOWER_DEPTH, TOWER_DEPTH))
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = max(-TOWER_DEPTH, min(value, TOWER_DEPTH - 1))
    return small


def _few_indices(values: list[int], depth: int) -> list[int]:
    if any(value < 0 for value in values):
        return [max(-depth, min(value, depth - 1)) for value in values]
    chosen = values[:: -(-len(values) // (depth - 1))][: depth - 1] if values else []
    return list(range(depth - len(chosen), depth))


# -- the rules ----------------------------------------------------------------------------------

Rule = Callable[[int, Told, Sizes], int]


def _to(number: int) -> Rule:
    return lambda value, told, sizes: number


def _at_most(number: int) -> Rule:
    return lambda value, told, sizes: min(value, number)


def _widths(times: float) -> Rule:
    return lambda value, told, sizes: round(sizes.width * times) if value > 0 else value


def _head(value: int, told: Told, sizes: Sizes) -> int:
    if "state_size" in told and "num_heads" in told:  # Mamba 2
        return _mamba_head(value, told, sizes)
    return HEAD_DIM if value == told.get("qk_rope_head_dim") else sizes.head_dim


def _heads(value: int, told: Told, sizes: Sizes) -> int:
    return 8 if "state_size" in told and "num_heads" in told else NUM_HEADS


def _pairs_of_heads(value: int, told: Told, sizes: Sizes) -> int:
    """Heads of keys and values: one, as many as there are queries, or between."""
    queries = ("num_attention_heads", "n_heads", "n_head", "num_heads", "linear_num_value_heads")
    named = [told[name] for name in queries if isinstance(told.get(name), int)]
    if "linear_num_value_heads" in told and value != told.get("num_key_value_heads"):
        named = [told["linear_num_value_heads"]]
    return 1 if value == 1 else NUM_HEADS if value in named else 2


def _mamba_head(value: int, told: Told, sizes: Sizes) -> int:
    expand = told.get("mamba_expand") or told.get("expand") or 2
    return round(expand * sizes.width) // 8


def _of_width(value: int, told: Told, sizes: Sizes) -> int:
    """A width that is a multiple of the model's own."""
    own = told.get("hidden_size") or told.get("d_model") or value
    return sizes.width * max(1, round(value / own))


def _of_width_a_head(value: int, told: Told, sizes: Sizes) -> int:
    heads = told.get("num_attention_heads") or NUM_HEADS
    own = told.get("hidden_size") or value * heads
    return sizes.width * max(1, round(value * heads / own)) // NUM_HEADS


def _groups(value: int, told: Told, sizes: Sizes) -> int:
    return min(value, 2)


def _chosen_groups(value: int, told: Told, sizes: Sizes) -> int:
    """Groups that are chosen from: fewer than there are, where the real model has it so."""
    total = told.get("n_group") or told.get("num_expert_group") or value
    return min(total, 2) if value >= total else 1


def _projected(value: int, told: Told, sizes: Sizes) -> int:
    """OPT's embeddings: as wide as the model, or narrower with a projection between."""
    return sizes.width if value == told.get("hidden_size") else sizes.width // 2


def _positions(value: int, told: Told, sizes: Sizes) -> int:
    """Rotary positions cost nothing, and their scaling compares the number with another."""
    is_rotary = told.get("rope_parameters") is not None or told.get("rope_scaling") is not None
    return value if is_rotary else min(value, MAX_POSITIONS)


def _real_vocabulary(value: int, told: Told, sizes: Sizes) -> int:
    return VOCABULARY - 8 if value < (told.get("vocab_size") or value) else VOCABULARY


def _window(value: int, told: Told, sizes: Sizes) -> int:
    """Tokens of a window of text, pixels of one of a tower."""
    if "patch_size" not in told:
        return min(value, 6)
    merge = told.get("spatial_merge_size")
    return PATCH * merge * 2 if merge else 2


def _picture(value: int, told: Told, sizes: Sizes) -> int:
    return PATCH * GRID


def _kv_shared(value: int, told: Told, sizes: Sizes) -> int:
    """The last layers, of which one of every kind is to come first."""
    if not value:
        return 0
    kinds = LayerKinds(told)
    share = round(sizes.num_layers * value / max(kinds.depth, 1))
    return max(1, min(share, sizes.num_layers - len(kinds.firsts)))


def _last_layer(value: int, told: Told, sizes: Sizes) -> int:
    return sizes.num_layers - 1


def _layers_before(value: int, told: Told, sizes: Sizes) -> int:
    return sizes.num_layers if value >= depth_of(told) else sizes.num_layers // 2


RULES: tuple[tuple[str, Rule], ...] = (
    # vocabulary and positions
    (r"(decoder_)?vocab_size(_per_layer_input)?", _to(VOCABULARY)),
    (r"unpadded_vocab_size", _real_vocabulary),
    (r".*(vocab_size|codebook_size|num_embeddings|hash_byte_group_vocab)", _at_most(64)),
    (r"(max_position_embeddings|n_positions|max_seq_len|context_length)", _positions),
    (r"(n_ctx|max_(source|target)_positions|seq_len|max_2d_position_embeddings)", _at_most(128)),
    # heads
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads)", _at_most(8)),
    (r"(mamba_d_head|mamba_head_?dim)", _mamba_head),
    (r".*(key_value_heads|kv_heads|kv_n_heads|num_key_heads|num_query_groups)", _pairs_of_heads),
    (r"(.*_)?(attention_heads|num_heads|n_heads?|heads)", _heads),
    (r".*attention_heads_per_layer|linear_num_value_heads", _to(NUM_HEADS)),
    (r"attention_head_dim", _of_width_a_head),
    (r"qk_head_dim", _to(2 * HEAD_DIM)),
    (r"qk_(rope|nope)_head_dim", lambda value, told, sizes: HEAD_DIM if value else 0),
    (r"v_head_dim", lambda v, told, s: HEAD_DIM if told.get("kv_lora_rank") else s.head_dim),
    (r"index(er)?_head_dim", _to(2 * HEAD_DIM)),
    (r"(.*_)?head_dim|kv_channels|attention_head_size|d_head|d_kv|dim_head", _head),
    (r"(rotary_dim|d_rel)", _to(4)),
    # widths
    (r"hidden_size_per_layer_input", _widths(0.25)),
    (r"word_embed_proj_dim", _projected),
    (r"(attention_hidden_size|mamba_d_ssm)", _of_width),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|dim_model|lru_width)", _widths(1)),
    (r"(emb|embed|embedding|output|input|projection|adapter_in|adapter_out)_(dim|size)", _widths(1)),
    (r"(.*_)?(output|input|projector_input|embedding|embed)_(dim|size)", _widths(1)),
    (r"(shared_|moe_|expert_|share_).*(intermediate_size|ffn_hidden_size|expert_dim)", _widths(0.5)),
    (r"alignment_intermediate_size|merged_hidden_size", _widths(2)),
    (r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_(dim|hidden_size)", _widths(2)),
    (r"n_inner|d_ff|dff|dim_ff|d_inner|mlp_dim|block_ff_dim|feed_forward_size", _widths(2)),
    (r"(q|kv|o)_lora_rank", _to(16)),
    (r"(laurel_rank|time_step_rank|mamba_dt_rank|adapter_rank|gated_norm_rank|hc_lowrank)", _at_most(4)),
    # experts
    (r"(num_(local_)?|n_routed_|moe_num_)experts|zero_expert_num", _at_most(4)),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|.*shared_experts", _at_most(2)),
    (r"n_group|num_expert_group|n_groups|mamba_n_?groups|o_groups", _groups),
    (r"topk_group", _chosen_groups),
    (r"num_kv_shared_layers", _kv_shared),
    (r"moe_layer_end_index", _last_layer),
    (r"max_window_layers", _layers_before),
    # states, windows
    (r"(mamba_d_state|ssm_state_size|state_size|mamba_chunk_size|chunk_size)", _at_most(8)),
    (r"(.*_)?(sliding_window|window_size|window_len|window_length)|local_attention", _window),
    (r"attention_chunk_size|keep_window_size|block_size", _at_most(8)),
    (r"index_(topk|block_size|kpool)", _at_most(4)),
    (r"index_topk_blocks", _at_most(2)),
    (r"block_multiple_of", _at_most(8)),
    # towers
    (r"(.*_)?image_size|crop_size|resolution", _picture),
    (r"patch_size", _to(PATCH)),
    (r"num_position_embeddings|num_patches|position_embedding_size", _to(GRID * GRID)),
    (r"pos_emb_(height|width)|posemb_grid_size", _to(GRID)),
    (r"mm_tokens_per_image|num_query_tokens|.*n(um)?_latents|latent_query_num", _at_most(4)),
    (r"resampler_depth|num_global_layers", _at_most(2)),
)
