"""Sizes of a cut-down configuration, by the names of fields: the first rule that fits counts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# -- which layers of a model are alike, read from the lists of its configuration, and fewer of them
# A layer's kind is all that the configuration says about it alone: its entry in every list with
# one entry a layer, whether its index is in a list of indices, what is overridden for it. In a
# copy with fewer layers the kinds take turns, in the order in which they first appear.

ConfigFields = Mapping[str, Any]
DEPTHS = (
    *("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers"),
    *("num_layers", "layers", "num_blocks", "depth", "encoder_layers", "num_encoder_layers"),
)
# lists of the indices of some layers
INDICES = (
    *("attn_layer_indices", "cross_attention_layers", "full_attn_idxs", "hybrid_layer_ids"),
    *("mlp_only_layers", "moe_layers", "ple_layer_ids", "local_layer_ids", "rope_scaling_layers"),
)
# every n-th layer is another: (interval, where it begins)
INTERVALS = (
    *(("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset")),
    *(("decoder_sparse_step", None), ("moe_layer_interval", None), ("layer_group_size", None)),
    ("n_layers_per_attn_res_block", None),
)
LISTED = ("attn_layer_period", "layer_group_size")  # said by the list of kinds, where there is one
# entry of a layer: the layer whose keys and values it uses
SOURCES = ("kv_source_layers",)
# so many first layers are dense, in models without a list of kinds
PREFIXES = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
MOST = 4  # layers of an interval in a copy


def depth_of(told: ConfigFields) -> int:
    """The number of layers; 0: the configuration has none."""
    found = next((told[name] for name in DEPTHS if isinstance(told.get(name), int)), 0)
    lists = (told.get(name) for name in ("layers_block_type", "layer_types"))
    return found or next((len(one) for one in lists if isinstance(one, list)), 0)


class LayerKinds:
    """The kinds of layers of one configuration.

    Args:
        told: its fields, as `to_dict` gives them.

    Attributes:
        depth: the number of layers.
        firsts: of each kind the first layer, in rising order.
        last: of them, the one of the last layer's kind.
    """

    def __init__(self, told: ConfigFields) -> None:
        self.told = told
        self.depth = depth_of(told)
        self.lists = [name for name, value in told.items() if self._is_list(name, value)]
        self.indices = [name for name in INDICES if isinstance(told.get(name), list)]
        self.sources = [name for name in SOURCES if isinstance(told.get(name), list)]
        own = told.get("per_layer_config") or {}
        self.overrides = {int(index): fields for index, fields in own.items()}
        kinds: dict[str, int] = {}
        for index in range(self.depth):
            kinds.setdefault(self._kind(index), index)
        self.firsts = list(kinds.values())
        self.last = kinds[self._kind(self.depth - 1)] if self.depth else 0

    @property
    def period(self) -> int:
        """So many layers of a copy have every kind."""
        patterns = [len(self.told.get("block_types") or [0])]
        listed = {"layers_block_type", "layer_types"} & set(self.lists)
        names = [name for name, _ in INTERVALS if not (listed and name in LISTED)]
        steps = [_interval(self.told.get(name)) for name in names]
        before = any(self.told.get(name) for name in PREFIXES) and len(self.firsts) == 1
        return math.lcm(max(len(self.firsts), 1 + before), *patterns, *steps)

    def models(self, num_layers: int) -> list[int]:
        """For each layer of a copy the one that it is made after; the last one like the last."""
        models = [self.firsts[index % len(self.firsts)] for index in range(num_layers)]
        if num_layers > len(self.firsts):
            models[-1] = self.last
        return models

    def fewer(self, num_layers: int) -> dict[str, Any]:
        """The fields that tell the kinds, for a copy of so many layers."""
        models = self.models(num_layers)
        fields: dict[str, Any] = {}
        for name in self.lists:
            entries = [self.told[name][model] for model in models]
            fields[name] = "".join(entries) if isinstance(self.told[name], str) else entries
        for name in self.indices:
            fields[name] = [i for i, model in enumerate(models) if model in self.told[name]]
        for name in self.sources:
            fields[name] = _sources(self.told[name], models)
        if self.overrides:
            own = {i: self.overrides[m] for i, m in enumerate(models) if m in self.overrides}
            fields["per_layer_config"] = own
        for name, offset in INTERVALS:
            if isinstance(self.told.get(name), int):
                fields[name] = _interval(self.told[name])
                if offset:
                    fields[offset] = self.told[offset] % fields[name]
        fields |= {name: min(self.told[name], 1) for name in PREFIXES if self.told.get(name)}
        return fields

    def _is_list(self, name: str, value: object) -> bool:
        if name in (*INDICES, *SOURCES) or not isinstance(value, list | str):
            return False
        if isinstance(value, str):
            return name.endswith("pattern") and len(value) == self.depth > 0
        return len(value) == self.depth > 1 and not name.endswith(("token_ids", "token_id"))

    def _kind(self, index: int) -> str:
        facts: list[object] = [self.told[name][index] for name in self.lists]
        facts += [index in self.told[name] for name in self.indices]
        facts += [self.told[name][index] == index for name in self.sources]
        return repr((facts, self.overrides.get(index)))


def _interval(step: object) -> int:
    """An interval of at most `MOST` layers; halves keep what two intervals have in common."""
    if not isinstance(step, int) or step < 1:
        return 1
    while step > MOST:
        step = step // 2 if step % 2 == 0 else MOST
    return step


def _sources(told: Sequence[int], models: Sequence[int]) -> list[int]:
    made: list[int] = []
    for index, model in enumerate(models):
        made.append(index if told[model] == model or not made else made[-1])
    return made


# -------------------------------------------------------------------------------------------------

FieldValues = dict[str, Any]
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


Rule = Callable[[int, FieldValues, Sizes], int]


def _to(number: int) -> Rule:
    return lambda value, told, sizes: number


def _at_most(number: int) -> Rule:
    return lambda value, told, sizes: min(value, number)


def _widths(times: float) -> Rule:
    return lambda value, told, sizes: round(sizes.width * times) if value > 0 else value


def _head(value: int, told: FieldValues, sizes: Sizes) -> int:
    if "state_size" in told and "num_heads" in told:  # Mamba 2
        return _mamba_head(value, told, sizes)
    if "kv_lora_rank" in told:
        return _latent_head(value, told, sizes)
    return sizes.head_dim


def _latent_head(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Parts of a head of latent attention: the part that is rotated has `HEAD_DIM` numbers."""
    own = told.get("qk_rope_head_dim") or told.get("qk_nope_head_dim") or value
    return round(value * HEAD_DIM / own) if own else 0


def _heads(value: int, told: FieldValues, sizes: Sizes) -> int:
    return 8 if "state_size" in told and "num_heads" in told else NUM_HEADS


def _pairs_of_heads(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Heads of keys and values: one, as many as there are queries, or between."""
    queries = ("num_attention_heads", "n_heads", "n_head", "num_heads", "linear_num_value_heads")
    named = [told[name] for name in queries if isinstance(told.get(name), int)]
    if "linear_num_value_heads" in told and value != told.get("num_key_value_heads"):
        named = [told["linear_num_value_heads"]]
    return 1 if value == 1 else NUM_HEADS if value in named else 2


def _mamba_head(value: int, told: FieldValues, sizes: Sizes) -> int:
    expand = told.get("mamba_expand") or told.get("expand") or 2
    return round(expand * sizes.width) // 8


def _of_width(value: int, told: FieldValues, sizes: Sizes) -> int:
    """A width that is a multiple of the model's own."""
    own = told.get("hidden_size") or told.get("d_model") or value
    return sizes.width * max(1, round(value / own))


def _inner(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Twice the width; four times where it is so: towers that merge four patches rely on it."""
    return sizes.width * (4 if value == 4 * (told.get("hidden_size") or 0) else 2)


def _with_earlier_states(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Of a tower: its width, and once more for each block whose states are handed out."""
    blocks = told.get("intermediate_layers_indices") or ()
    return sizes.width * (1 + min(len(blocks), TOWER_DEPTH - 1))


def _of_width_a_head(value: int, told: FieldValues, sizes: Sizes) -> int:
    heads = told.get("num_attention_heads") or NUM_HEADS
    own = told.get("hidden_size") or value * heads
    return sizes.width * max(1, round(value * heads / own)) // NUM_HEADS


def _groups(value: int, told: FieldValues, sizes: Sizes) -> int:
    return min(value, 2)


def _chosen_groups(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Groups that are chosen from: fewer than there are, where the real model has it so."""
    total = told.get("n_group") or told.get("num_expert_group") or value
    return min(total, 2) if value >= total else 1


def _projected(value: int, told: FieldValues, sizes: Sizes) -> int:
    """OPT's embeddings: as wide as the model, or narrower with a projection between."""
    return sizes.width if value == told.get("hidden_size") else sizes.width // 2


def _positions(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Rotary positions cost nothing, and their scaling compares the number with another."""
    is_rotary = told.get("rope_parameters") is not None or told.get("rope_scaling") is not None
    return value if is_rotary else min(value, MAX_POSITIONS)


def _real_vocabulary(value: int, told: FieldValues, sizes: Sizes) -> int:
    return VOCABULARY - 8 if value < (told.get("vocab_size") or value) else VOCABULARY


def _window(value: int, told: FieldValues, sizes: Sizes) -> int:
    """Tokens of a window of text, pixels of one of a tower."""
    if "patch_size" not in told:
        return min(value, 6)
    merge = told.get("spatial_merge_size")
    return PATCH * merge * 2 if merge else 2


def _picture(value: int, told: FieldValues, sizes: Sizes) -> int:
    return PATCH * GRID


def _kv_shared(value: int, told: FieldValues, sizes: Sizes) -> int:
    """The last layers, of which one of every kind is to come first."""
    if not value:
        return 0
    kinds = LayerKinds(told)
    share = round(sizes.num_layers * value / max(kinds.depth, 1))
    return max(1, min(share, sizes.num_layers - len(kinds.firsts)))


def _last_layer(value: int, told: FieldValues, sizes: Sizes) -> int:
    return sizes.num_layers - 1


def _layers_before(value: int, told: FieldValues, sizes: Sizes) -> int:
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
    (r"qk_(rope_|nope_)?head_dim", _latent_head),
    (r"index(er)?_head_dim", lambda value, told, sizes: 2 * sizes.head_dim),
    (r"(.*_)?head_dim|kv_channels|attention_head_size|d_head|d_kv|dim_head", _head),
    (r"(rotary_dim|d_rel)", _to(4)),
    # widths
    (r"hidden_size_per_layer_input", _widths(0.25)),
    (r"word_embed_proj_dim", _projected),
    (r"attention_hidden_size", _of_width),
    (r"mamba_d_ssm", lambda value, told, sizes: 8 * _mamba_head(value, told, sizes)),
    (r"base_channels", _at_most(32)),
    (r"output_proj_dims", _widths(1)),
    (r"hidden_sizes|output_channels|downsample_channels", _widths(1)),
    (r"(.*_)?(hidden_size(_global)?|hidden_dim|d_model|n_embd|dim_model|lru_width)", _widths(1)),
    (
        r"(emb|embed|embedding|output|input|projection|adapter_in|adapter_out)_(dim|size)",
        _widths(1),
    ),
    (r"vision_output_dim", _with_earlier_states),
    (r"(.*_)?(output|input|projector_input|embedding|embed)_(dim|size)", _widths(1)),
    (
        r"(shared_|moe_|expert_|share_).*(intermediate_size|ffn_hidden_size|expert_dim)",
        _widths(0.5),
    ),
    (r"alignment_intermediate_size|merged_hidden_size", _widths(2)),
    (r"(.*_)?intermediate_size(_mlp)?|(.*_)?ffn_(dim|hidden_size)", _inner),
    (r"n_inner|d_ff|dff|dim_ff|d_inner|mlp_dim|block_ff_dim|feed_forward_size", _widths(2)),
    (r"(q|kv|o)_lora_rank", _to(16)),
    (
        r"(laurel_rank|time_step_rank|mamba_dt_rank|adapter_rank|gated_norm_rank|hc_lowrank)",
        _at_most(4),
    ),
    # experts
    (r"(num_(local_)?|n_routed_|moe_num_)experts|zero_expert_num", _at_most(4)),
    (
        r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|.*shared_experts",
        _at_most(2),
    ),
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
    (r"(.*_)?image_size|max_img_size|crop_size|resolution", _picture),
    (r"patch_size", _to(PATCH)),
    (r"num_position_embeddings|num_patches|position_embedding_size", _to(GRID * GRID)),
    (r"pos_emb_(height|width)|posemb_grid_size", _to(GRID)),
    (r"mm_tokens_per_image|num_query_tokens|.*n(um)?_latents|latent_query_num", _at_most(4)),
    (r"vision_soft_tokens_per_image", _to(GRID * GRID)),
    (r"resampler_depth|num_global_layers", _at_most(2)),
)


# -- what no rule by the name of a field can know about a family, by model type, with the reason --

Change = Callable[[dict[str, Any], Any], None]

# rotary positions of three axes: the shares that the model's code takes where the configuration
# tells none, in numbers of the head of the real model
SECTIONS: dict[str, list[int]] = {
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), [16, 24, 24]
    ),
    **dict.fromkeys(
        (
            *("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "cohere_compass_text"),
            *("cosmos3_edge_text", "cosmos3_omni_text"),
        ),
        [24, 20, 20],
    ),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm46v_text"), [8, 12, 12]),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), [11, 11, 10]),
    "ernie4_5_vl_moe_text": [22, 22, 20],
}

# the class of the configuration divides a width by 64 for its number of heads
LEAST_HEAD_DIM = {"granite4_vision": 16}


def _absolute_positions(small: dict[str, Any], sizes: Any) -> None:
    """Reformer's axial positions take rows of one length alone."""
    small["axial_pos_embds"] = False


def _soft_tokens(small: dict[str, Any], sizes: Any) -> None:
    """Gemma3n knows pictures and sounds by ids above those of text."""
    for name, start, token in (("vision", 112, "image"), ("audio", 120, "audio")):
        small[f"{name}_config"] |= {"vocab_offset": start, "vocab_size": 8}
        small[f"{token}_token_id"] = start + 1
    small["text_config"]["vocab_size_per_layer_input"] = 112


def _merged_patches(small: dict[str, Any], sizes: Any) -> None:
    """Muse hands out as many times the tower's width as patches become one token."""
    small["out_hidden_size"] = sizes.width * small["vision_config"]["merge_size"] ** 2


def _queries_of_patches(small: dict[str, Any], sizes: Any) -> None:
    """Aria's projector has so many tokens for so many patches."""
    small["projector_patch_to_query_dict"] = {16: 4}


def _states_for_layers(small: dict[str, Any], sizes: Any) -> None:
    """Granite 4 Vision adds states of the tower to the inputs of deeper layers."""
    last = sizes.num_layers - 1
    small["deepstack_layer_map"] = [(-3, min(1, last)), (-2, min(2, last))]
    places = range(len(small["spatial_target_layers"]))
    small["spatial_target_layers"] = [min(place + 1, last) for place in places]


def _shuffled_patches(small: dict[str, Any], sizes: Any) -> None:
    """Llama 4's projector takes what of the tower's width the shuffle of pixels makes."""
    vision = small["vision_config"]
    times = round(1 / vision["pixel_shuffle_ratio"]) ** 2
    vision["intermediate_size"] = sizes.width * times


EXCEPTIONS: dict[str, tuple[Change, ...]] = {
    "aria": (_queries_of_patches,),
    "granite4_vision": (_states_for_layers,),
    "llama4": (_shuffled_patches,),
    "muse_glimmer": (_merged_patches,),
    "muse_spark": (_merged_patches,),
    "gemma3n": (_soft_tokens,),
    "reformer": (_absolute_positions,),
}
