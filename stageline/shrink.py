"""Scale down a copy of any transformers configuration, on which a split is checked first.

Special traits of a family stay: multipliers, caps, flags, the kinds of layers and their relations.
Sizes shrink by the name of the field: depth, width, heads, experts, vocabulary, towers. Rules by
name serve future families, too. Exceptions of single families are at the end.
"""

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from stageline.errors import UserError
from stageline.model_folder import is_token, parts_of, special_tokens, walk_config

FieldValues = dict[str, Any]


def shrink_config(config: PretrainedConfig, *, num_layers: int) -> PretrainedConfig:
    """Return a copy of `config` that a CPU runs in milliseconds.

    Args:
        num_layers: of the language model; with `layer_period(config)` or more, every kind of layer
            is among them.

    Raises:
        UserError: the class of the configuration refuses the copy.
    """
    special = sorted(one for one in special_tokens(config) if one > 2)
    ids = {one: place for place, one in enumerate([0, 1, 2, *special])}
    head_dim = _head_dim(config)
    sizes = Sizes(num_layers, head_dim, NUM_HEADS * head_dim, ids)
    text = config.get_text_config(decoder=True)
    try:
        # an encoder-decoder has no configuration for its decoder: all of it is text
        is_inside = any(part is text for part in walk_config(config))
        small = _shrink_part(config, sizes, text if is_inside else config)
        _except(config.model_type, small, sizes)
        return type(config).from_dict(small)
    except Exception as error:  # the checks of some hundred classes raise any type
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{config.model_type} could not be cut down to {num_layers} layers ({why}). Add the "
            "family to stageline/shrink.py."
        ) from error


def layer_period(config: PretrainedConfig) -> int:
    """Return the number of layers of a copy that has every kind of layer; 1: all are alike."""
    return LayerKinds(config.get_text_config(decoder=True).to_dict()).period


DEPTHS = (
    "decoder_layers num_decoder_layers num_hidden_layers n_layer n_layers num_layers layers "
    "num_blocks depth encoder_layers num_encoder_layers"
).split()
# lists of the indices of some layers
INDICES = (
    "attn_layer_indices cross_attention_layers full_attn_idxs hybrid_layer_ids mlp_only_layers "
    "moe_layers ple_layer_ids local_layer_ids rope_scaling_layers"
).split()
# every n-th layer is another: (interval, where it begins)
INTERVALS = (
    *(("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset")),
    *(("decoder_sparse_step", None), ("moe_layer_interval", None), ("layer_group_size", None)),
    ("n_layers_per_attn_res_block", None),
)
KINDS = ("layers_block_type", "layer_types")
LISTED = ("attn_layer_period", "layer_group_size")  # redundant where there is a list of kinds
SOURCES = ("kv_source_layers",)  # entry of a layer: the layer whose keys and values it uses
# numbers of first layers that are dense, in models without a list of kinds
PREFIXES = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
MOST = 4  # most layers of an interval in a copy


class LayerKinds:
    """The kinds of layers of one configuration.

    Args:
        told: its fields, as `to_dict` gives them; a depth of 0: it has no layers.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        depths = [told[name] for name in DEPTHS if isinstance(told.get(name), int)]
        lists = [told[name] for name in KINDS if isinstance(told.get(name), list)]
        self.depth = next(iter(depths), 0) or next(map(len, lists), 0)
        self.lists = [name for name, value in told.items() if self._is_list(name, value)]
        self.indices = [name for name in INDICES if isinstance(told.get(name), list)]
        self.sources = [name for name in SOURCES if isinstance(told.get(name), list)]
        own = told.get("per_layer_config") or {}
        self.overrides = {int(index): fields for index, fields in own.items()}
        kinds: dict[str, int] = {}
        for index in range(self.depth):
            kinds.setdefault(self._kind(index), index)
        self.firsts = list(kinds.values())  # the first layer of each kind, in rising order
        self.last = kinds[self._kind(self.depth - 1)] if self.depth else 0

    @property
    def period(self) -> int:
        """Return the number of layers with which a copy has every kind."""
        patterns = [len(self.told.get("block_types") or [0])]
        is_listed = any(name in KINDS for name in self.lists)
        names = [name for name, _ in INTERVALS if not (is_listed and name in LISTED)]
        steps = [_interval(self.told.get(name)) for name in names]
        before = any(self.told.get(name) for name in PREFIXES) and len(self.firsts) == 1
        return math.lcm(max(len(self.firsts), 1 + before), *patterns, *steps)

    def fewer(self, num_layers: int) -> FieldValues:
        """Return the fields with the kinds of layers, for a copy of `num_layers`."""
        # each layer copies one of the original; the last one copies the last
        models = [self.firsts[index % len(self.firsts)] for index in range(num_layers)]
        if num_layers > len(self.firsts):
            models[-1] = self.last
        fields: FieldValues = {}
        for name in self.lists:
            entries = [self.told[name][model] for model in models]
            fields[name] = "".join(entries) if isinstance(self.told[name], str) else entries
        for name in self.indices:
            fields[name] = [i for i, model in enumerate(models) if model in self.told[name]]
        for name in self.sources:
            made: list[int] = []
            for index, model in enumerate(models):
                made.append(index if self.told[name][model] == model or not made else made[-1])
            fields[name] = made
        if self.overrides:
            own = {i: self.overrides[m] for i, m in enumerate(models) if m in self.overrides}
            fields["per_layer_config"] = own
        for name, offset in INTERVALS:
            if isinstance(self.told.get(name), int):
                fields[name] = _interval(self.told[name])
                if offset:
                    fields[offset] = self.told[offset] % fields[name]
        if shared := self.told.get("num_kv_shared_layers"):
            # the last layers use the keys of others; before them comes one of every kind
            shared = round(num_layers * shared / self.depth)
            fields["num_kv_shared_layers"] = max(1, min(shared, num_layers - len(self.firsts)))
        return fields | {name: min(self.told[name], 1) for name in PREFIXES if self.told.get(name)}

    def _is_list(self, name: str, value: object) -> bool:
        if isinstance(value, str):
            return name.endswith("pattern") and len(value) == self.depth > 0
        if name in (*INDICES, *SOURCES) or not isinstance(value, list):
            return False
        return len(value) == self.depth > 1 and not name.endswith(("token_ids", "token_id"))

    def _kind(self, index: int) -> str:
        facts: list[object] = [self.told[name][index] for name in self.lists]
        facts += [index in self.told[name] for name in self.indices]
        facts += [self.told[name][index] == index for name in self.sources]
        return repr((facts, self.overrides.get(index)))


def _interval(step: object) -> int:
    """Return an interval of at most `MOST` layers; halving keeps common divisors."""
    if not isinstance(step, int) or step < 1:
        return 1
    while step > MOST:
        step = step // 2 if step % 2 == 0 else MOST
    return step


NUM_HEADS = 4
HEAD_DIM = 8  # more where partial or three-axis rotary positions need it
VOCABULARY = 128
TOWER_DEPTH = 4
PATCH, GRID = 4, 4  # pixels of a patch, patches of a row of a picture
TOWER_INDICES = (  # fields with indices of blocks
    "deepstack_visual_indexes fullatt_block_indexes global_attn_indexes "
    "intermediate_layers_indices out_indices vision_feature_layer"
).split()
DROPOUT = re.compile(
    r".*(dropout|drop|drop_?path|layerdrop|jitter|noise)(_prob|_rate|_p|_noise|_eps)?|.*pdrop"
)


@dataclass(frozen=True)
class Sizes:
    """Sizes that all parts of a copy share: one width, so that any two of them fit together."""

    num_layers: int
    head_dim: int
    width: int
    ids: Mapping[int, int]  # special token -> its place in the small vocabulary


def _number(name: str, value: int, told: FieldValues, sizes: Sizes) -> int:
    """Return the number of a copy for `value`, by the names of its field and of the others."""

    def first(*names: str) -> int | None:
        """Return the first of these fields that is a number other than 0."""
        return next((told[one] for one in names if type(told.get(one)) is int and told[one]), None)

    if value < 1:  # a part that is switched off stays off
        return value
    width, hidden = sizes.width, first("hidden_size") or 0
    is_mamba_2 = "state_size" in told and "num_heads" in told
    mamba_head = round((told.get("mamba_expand") or told.get("expand") or 2) * width) // 8
    # rotary positions cost nothing, and their scaling compares the number with another
    is_rotary = told.get("rope_parameters") is not None or told.get("rope_scaling") is not None
    positions = value if is_rotary else min(value, 128)
    # keys have one head, as many as there are queries, or between
    queries = ["num_attention_heads", "n_heads", "n_head", "num_heads"]
    if "linear_num_value_heads" in told:
        is_full = value == told.get("num_key_value_heads")
        queries = [*(queries if is_full else ()), "linear_num_value_heads"]
    is_alike = any(type(told.get(one)) is int and told[one] == value for one in queries)
    key_heads = 1 if value == 1 else NUM_HEADS if is_alike else 2
    heads_width = value * (first("num_attention_heads") or NUM_HEADS)
    times = max(1, round(heads_width / (hidden or heads_width)))
    attention_times = max(1, round(value / (hidden or first("d_model") or value)))
    # latent attention: the rotated part of a head has `HEAD_DIM` numbers
    latent_head = round(value * HEAD_DIM / (first("qk_rope_head_dim", "qk_nope_head_dim") or value))
    head_dim = latent_head if "kv_lora_rank" in told else sizes.head_dim
    head_dim = mamba_head if is_mamba_2 else head_dim
    groups = first("n_group", "num_expert_group") or value
    blocks = told.get("intermediate_layers_indices") or ()  # their states are handed out
    window = min(value, 6)  # tokens; of a tower pixels
    if "patch_size" in told:
        window = 2 * PATCH * (first("spatial_merge_size") or 0) or 2
    # four times the width where it is so: towers that merge four patches rely on it
    inner = width * (4 if value == 4 * hidden else 2)
    rules: dict[str, int] = {  # the first that fits counts
        r"unpadded_vocab_size": VOCABULARY - 8 * (value < (first("vocab_size") or value)),
        r"max_position_embeddings|n_positions|max_seq_len|context_length|n_ctx|seq_len"
        r"|max_(source|target)_positions|max_2d_position_embeddings": positions,
        # heads
        r"mamba_d_head|mamba_head_?dim": mamba_head,
        r".*(key_value_heads|kv_heads|kv_n_heads|num_key_heads|num_query_groups)": key_heads,
        r"mamba_n_heads|mamba_num_heads|n_mamba_heads": min(value, 8),
        r"(.*_)?(attention_heads|num_heads|n_heads?|heads)": 8 if is_mamba_2 else NUM_HEADS,
        r"attention_head_dim": width * times // NUM_HEADS,
        r"qk_(rope_|nope_)?head_dim": latent_head,
        r"index(er)?_head_dim": 2 * sizes.head_dim,
        r"(.*_)?head_dim|kv_channels|attention_head_size|d_head|d_kv|dim_head": head_dim,
        # widths and layers; OPT's projection is as wide as the model, or narrower
        r"word_embed_proj_dim": width if value == hidden else width // 2,
        r"attention_hidden_size": width * attention_times,
        r"mamba_d_ssm": 8 * mamba_head,
        r"vision_output_dim": width * (1 + min(len(blocks), TOWER_DEPTH - 1)),
        r"topk_group": min(groups, 2) if value >= groups else 1,
        r"moe_layer_end_index": sizes.num_layers - 1,
        r"max_window_layers": sizes.num_layers // (1 + (value < (first(*DEPTHS) or 0))),
        r"(.*_)?(sliding_window|window_size|window_len|window_length)|local_attention": window,
        # numbers of every copy
        r"(decoder_)?vocab_size(_per_layer_input)?": VOCABULARY,
        r".*attention_heads_per_layer": NUM_HEADS,
        r"rotary_dim|d_rel": 4,
        r"(q|kv|o)_lora_rank": 16,
        r"(.*_)?image_size|max_img_size|crop_size|resolution": PATCH * GRID,
        r"patch_size": PATCH,
        r"num_position_embeddings|num_patches|vision_soft_tokens_per_image": GRID * GRID,
        r"pos_emb_(height|width)|posemb_grid_size": GRID,
        # shares of the width
        r"hidden_size_per_layer_input": width // 4,
        r"(.*_)?(hidden_size(_global)?|hidden_dim|d_model|n_embd|dim_model|lru_width)"
        r"|output_proj_dims|hidden_sizes|output_channels|downsample_channels"
        r"|(.*_)?(output|input|projection|adapter_(in|out)|emb(ed(ding)?)?)_(dim|size)": width,
        r"(shared_|moe_|expert_|share_).*(intermediate_size|ffn_hidden_size|expert_dim)": width
        // 2,
        r"alignment_intermediate_size|n_inner|d_ff|dff|dim_ff|d_inner|mlp_dim|block_ff_dim"
        r"|feed_forward_size": 2 * width,
        r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_(dim|hidden_size)": inner,
        # embeddings, experts, states, windows, towers
        r".*(vocab_size|codebook_size|num_embeddings|hash_byte_group_vocab)": min(value, 64),
        r"base_channels": min(value, 32),
        r"laurel_rank|time_step_rank|mamba_dt_rank|adapter_rank|gated_norm_rank|hc_lowrank"
        r"|(num_(local_)?|n_routed_|moe_num_)experts|zero_expert_num|index_(topk|block_size|kpool)"
        r"|mm_tokens_per_image|num_query_tokens|.*n(um)?_latents|latent_query_num": min(value, 4),
        r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|.*shared_experts"
        r"|n_group|num_expert_group|n_groups|mamba_n_?groups|o_groups|index_topk_blocks"
        r"|resampler_depth|num_global_layers": min(value, 2),
        r"mamba_d_state|ssm_state_size|state_size|mamba_chunk_size|chunk_size|block_multiple_of"
        r"|attention_chunk_size|keep_window_size|block_size|floor_scale": min(value, 8),
    }
    return next((number for rule, number in rules.items() if re.fullmatch(rule, name)), value)


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
            if not is_text:
                small[name] = min(value, TOWER_DEPTH)
            elif kinds.depth % value and value % kinds.depth:
                small[name] = 2
            else:  # twice as many layers as of another stack stay twice as many
                small[name] = max(1, round(depth * value / kinds.depth))
        elif name in kinds.lists and not isinstance(value, str):
            small[name] = _shrink_list(name, value, told, sizes)
        elif name not in (*kinds.lists, *kinds.indices, *kinds.sources, *DEPTHS):
            small[name] = _shrink(name, value, told, sizes)
    for name in TOWER_INDICES:  # indices of blocks: as many as fit, from the front or from the back
        value, most = told.get(name), min(depth or TOWER_DEPTH, TOWER_DEPTH)
        if isinstance(value, list) and all(one >= 0 for one in value):
            small[name] = list(range(most - min(len(value), most - 1), most))
        elif isinstance(value, list):
            small[name] = [max(-most, min(one, most - 1)) for one in value]
        elif type(value) is int:
            small[name] = max(-most, min(value, most - 1))
    return small


def _shrink_list(name: str, values: list, told: FieldValues, sizes: Sizes) -> list:
    """Return one entry per layer: different numbers stay different, and multiples of the least."""
    numbers = {one for one in values if isinstance(one, int) and not isinstance(one, bool)}
    small = {}
    for rank, one in enumerate(sorted(numbers), 1):
        found = _shrink(name, one, told, sizes)
        small[one] = found if found == one else found * rank
    return [small.get(one, one) if type(one) is int else one for one in values]


def _shrink(name: str, value: Any, told: FieldValues, sizes: Sizes) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if name.startswith("rope_") and isinstance(value, dict):
        return _shrink_rope(value, told, sizes)
    if name == "image_grid_pinpoints":  # whole tiles, of which a picture has two a side at most
        tile = (told.get("vision_config") or {}).get("image_size") or min(map(min, value))
        tile = tile if isinstance(tile, int) else tile[0]
        tiles = {tuple(max(1, min(side // tile, 2)) for side in size) for size in value}
        return [[side * PATCH * GRID for side in one] for one in sorted(tiles)]
    if isinstance(value, list | tuple):
        return [_shrink(name, one, told, sizes) for one in value]
    if isinstance(value, dict):  # fields of one layer, say
        return {key: _shrink(str(key), one, told | value, sizes) for key, one in value.items()}
    if isinstance(value, int) and is_token(name):
        return sizes.ids.get(value, value)
    if isinstance(value, float):
        return 0.0 if DROPOUT.fullmatch(name) else value
    return _number(name, value, told, sizes) if isinstance(value, int) else value


def _head_dim(config: PretrainedConfig) -> int:
    """Return the smallest head size that holds all rotary positions."""
    needed = LEAST_HEAD_DIM.get(config.model_type, HEAD_DIM)
    for told in (part.to_dict() for part in walk_config(config)):
        whole = told.get("rope_parameters") or told.get("rope_scaling")
        whole = whole if isinstance(whole, dict) else {}
        ropes = [one for one in whole.values() if isinstance(one, dict)]  # a set for each kind
        for rope in (ropes or [whole]) if "kv_lora_rank" not in told else ():
            part = _rotary_part(rope, told)
            own = [value for name, value in rope.items() if name.endswith("_section") and value]
            axes = len(own[0] if own else SECTIONS.get(told.get("model_type", ""), [])) or 1
            while round(needed * part) < 2 * axes or needed * part % 2:
                needed *= 2
                if needed > 256:
                    return HEAD_DIM
    return needed


def _rotary_part(rope: FieldValues, told: FieldValues) -> float:
    part = rope.get("partial_rotary_factor") or told.get("partial_rotary_factor")
    return part or told.get("rotary_pct") or 1.0


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
            least, rest = divmod(size, len(value))  # axes with equal shares keep equal ones
            lone = next((place for place, one in enumerate(value) if value.count(one) == 1), 0)
            small[name] = [least + rest * (place == lone) for place in range(len(value))]
        elif name in ("long_factor", "short_factor"):
            small[name] = value[:size]
    return small


# What no rule can know about a family, with the reason.
# Three-axis rotary positions: the default shares in the model's code, in numbers of the head of the
# real model
_NAMES = {
    (16, 24, 24): "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text paddleocr_vl_text",
    (24, 20, 20): "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text cohere_compass_text "
    "cosmos3_edge_text cosmos3_omni_text",
    (8, 12, 12): "glm4v_text glm4v_moe_text glm_ocr_text glm46v_text",
    (11, 11, 10): "qwen3_5_text qwen3_5_moe_text qwen4_exp_text",
    (22, 22, 20): "ernie4_5_vl_moe_text",
}
SECTIONS = {name: list(shares) for shares, names in _NAMES.items() for name in names.split()}

# the class of the configuration divides a width by 64 for its number of heads
LEAST_HEAD_DIM = {"granite4_vision": 16}


def _except(model_type: str, small: FieldValues, sizes: Sizes) -> None:
    """Change the fields of a copy that no rule by name covers, for its family."""
    if model_type == "aria":  # its projector maps a number of patches to a number of tokens
        small["projector_patch_to_query_dict"] = {16: 4}
    elif model_type == "granite4_vision":  # states of the tower go to the inputs of deeper layers
        last = sizes.num_layers - 1
        small["deepstack_layer_map"] = [(-3, min(1, last)), (-2, min(2, last))]
        places = range(len(small["spatial_target_layers"]))
        small["spatial_target_layers"] = [min(place + 1, last) for place in places]
    elif model_type == "llama4":  # its projector takes what a shuffle of pixels makes
        vision = small["vision_config"]
        times = round(1 / vision["pixel_shuffle_ratio"]) ** 2
        vision["intermediate_size"] = sizes.width * times
    elif model_type in ("muse_glimmer", "muse_spark"):  # the patches of a token make its width
        small["out_hidden_size"] = sizes.width * small["vision_config"]["merge_size"] ** 2
    elif model_type == "gemma3n":  # pictures and sounds have ids above those of text
        for name, start, token in (("vision", 112, "image"), ("audio", 120, "audio")):
            small[f"{name}_config"] |= {"vocab_offset": start, "vocab_size": 8}
            small[f"{token}_token_id"] = start + 1
        small["text_config"]["vocab_size_per_layer_input"] = 112
    elif model_type == "reformer":  # axial positions take rows of one length only
        small["axial_pos_embds"] = False
