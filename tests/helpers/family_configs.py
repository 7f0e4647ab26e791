"""A configuration of any family of transformers to try a split on: the default one, completed.

Some classes leave fields unset without which their model cannot be built, or have only one kind
of layer by default. Multipliers, which most defaults leave at one, are set off it: a multiplier
that runs twice, or not at all, then shows. `stageline/shrink.py` cuts such a configuration down.
"""

import re
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

# without these the default configuration builds no model
LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 36,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "diffusion_gemma_text": {
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 704,
    },
    **dict.fromkeys(
        (
            *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "blip-2"),
            *("instructblip", "chameleon", "emu3"),
        ),
        {"image_token_id": 1000},
    ),
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        "num_experts_per_tok": 6,
    },
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
    "granite4_vision": {"deepstack_layer_map": [[-6, 4], [-3, 8]], "downsample_rate": "1/2"},
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [16, 16, 16, 16],
        },
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        {"vision_start_token_id": 151652, "vision_end_token_id": 151653},
    ),
    "reformer": {"is_decoder": True},
    "step3p5": {"sliding_window": 512},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}
# kinds of layers that the family has and its default configuration has not: they take turns
KINDS: dict[str, dict[str, tuple]] = {
    "granitemoehybrid": {"layer_types": ("linear_attention", "full_attention")},
    "lfm2": {"layer_types": ("conv", "full_attention")},
    "lfm2_moe": {"layer_types": ("conv", "full_attention")},
    "minimax_m3_vl_text": {"layer_types": ("full_attention", "minimax_m3_sparse")},
}
MULTIPLIERS: tuple[tuple[str, float], ...] = (
    (r"embedding_multiplier|scale_emb", 3.0),
    (r"residual_multiplier", 0.7),
    (r"logits_scaling|logit_scale|logits_mup_width_multiplier", 1.5),
    (r".*_multipliers?|route(d|r)?_(scale|scaling_factor)", 1.25),
)
FLAGS = {"scale_embedding": True, "mup_enabled": True, "is_decoder": True, "causal": True}


def family_config(name: str) -> PretrainedConfig:
    """Return the configuration of model type `name` at its full size."""
    config = CONFIG_MAPPING[name]()
    _complete(config)
    return config


EXPERTS = {  # their defaults have none, or one
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 704,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
}


def config_with_experts(name: str) -> PretrainedConfig:
    """Return the configuration of a mixture of experts that has several."""
    config = family_config(name)
    for field, value in EXPERTS.get(name, {}).items():
        setattr(config, field, value)
    return config


def _complete(config: PretrainedConfig) -> None:
    for path, value in LACKING.get(config.model_type, {}).items():
        holder, _, name = path.rpartition(".")
        if isinstance(value, str) and value in CONFIG_MAPPING:
            value = CONFIG_MAPPING[value]()
        setattr(getattr(config, holder) if holder else config, name, value)
    for name, kinds in KINDS.get(config.model_type, {}).items():
        depth = config.num_hidden_layers
        setattr(config, name, [kinds[index % len(kinds)] for index in range(depth)])
    for name, value in config.to_dict().items():
        part = config.__dict__.get(name)
        if isinstance(part, PretrainedConfig):
            _complete(part)
        elif (multiplier := _multiplier(name, value)) is not None:
            setattr(config, name, multiplier)
        elif name in FLAGS and isinstance(value, bool):
            setattr(config, name, FLAGS[name])


def _multiplier(name: str, value: object) -> object:
    """Another number for a multiplier of one; None: it is none, or not at one."""
    number = next((number for rule, number in MULTIPLIERS if re.fullmatch(rule, name)), None)
    if number is None or isinstance(value, bool):
        return None
    if isinstance(value, list) and value and all(one == 1.0 for one in value):
        return [round(number + place / 8, 3) for place in range(len(value))]
    return number if isinstance(value, float) and value == 1.0 else None
