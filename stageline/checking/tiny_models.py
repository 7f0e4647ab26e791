"""Tiny configurations of real architectures, for parity tests: seconds on a CPU, all of the code.

Each has 4 layers, so that 1 to 4 stages can be tried, and no dropout.
"""

from collections.abc import Callable, Mapping

import transformers
from transformers import PretrainedConfig

# -- what the tiny models of this folder share: sizes and special tokens --------------------------

VOCAB_SIZE = 64
IMAGE_TOKEN_ID = 5

TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


# -- tiny configurations of vision-language architectures; what an image becomes has 4 tokens -----
# Towers see tiles of 16 x 16 pixels, so that they fit tiny_processors.py.

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 16,
}


def _internvl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "hidden_dropout_prob": 0.0,
        "projection_dropout": 0.0,
        "layer_scale_init_value": 0.1,
        "use_mean_pooling": True,
    }
    return transformers.InternVLConfig(
        vision_config=vision,
        text_config={
            "model_type": "qwen2",
            **TEXT,
            "tie_word_embeddings": tied,
            **overrides,
        },
        image_token_id=IMAGE_TOKEN_ID,
        image_seq_length=4,
        tie_word_embeddings=tied,
    )


def _llava(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    return transformers.LlavaConfig(
        vision_config=_CLIP,
        text_config={"model_type": "llama", **TEXT, "tie_word_embeddings": tied, **overrides},
        image_token_index=IMAGE_TOKEN_ID,
        tie_word_embeddings=tied,
    )


def _llava_next(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    return transformers.LlavaNextConfig(
        vision_config=_CLIP,
        text_config={"model_type": "llama", **TEXT, "tie_word_embeddings": tied, **overrides},
        image_token_index=IMAGE_TOKEN_ID,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        tie_word_embeddings=tied,
    )


def _qwen2_vl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 16,  # of the text model here
        "num_heads": 2,
        "mlp_ratio": 2,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return _qwen(transformers.Qwen2VLConfig, vision, tied, overrides)


def _qwen2_5_vl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        **_QWEN_VISION,
        "depth": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return _qwen(transformers.Qwen2_5_VLConfig, vision, tied, overrides)


def _qwen3_vl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        **_QWEN_VISION,
        "depth": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1, 2],  # of 4 layers, so that features cross 2 borders
    }
    return _qwen(transformers.Qwen3VLConfig, vision, tied, {"head_dim": 8, **overrides})


def _qwen(
    config_class: type, vision: Mapping[str, object], tied: bool, overrides: dict[str, object]
) -> PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return config_class(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rope, "tie_word_embeddings": tied, **overrides},
        image_token_id=IMAGE_TOKEN_ID,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
        tie_word_embeddings=tied,
    )


def _idefics3(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    return _rows_and_columns(transformers.Idefics3Config, tied, overrides)


def _smolvlm(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    return _rows_and_columns(transformers.SmolVLMConfig, tied, overrides)


def _rows_and_columns(
    config_class: type, tied: bool, overrides: dict[str, object]
) -> PretrainedConfig:
    return config_class(
        vision_config=_SIGLIP,
        text_config={"model_type": "llama", **TEXT, "tie_word_embeddings": tied, **overrides},
        image_token_id=IMAGE_TOKEN_ID,
        scale_factor=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def _gemma3_vl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    text = {
        **TEXT,
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": tied,
        **overrides,
    }
    return transformers.Gemma3Config(
        vision_config={**_SIGLIP, "vision_use_head": False},
        text_config=text,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN_ID,
        boi_token_index=6,
        eoi_token_index=7,
        tie_word_embeddings=tied,
    )


VISION_LANGUAGE_CONFIGS: dict[str, Callable[[bool, dict[str, object]], PretrainedConfig]] = {
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "gemma3_vl": _gemma3_vl,
}


# -------------------------------------------------------------------------------------------------

__all__ = [
    "DECODERS",
    "IMAGE_TOKEN_ID",
    "VISION_LANGUAGE",
    "VOCAB_SIZE",
    "tiny_config",
]

DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
)
VISION_LANGUAGE = tuple(VISION_LANGUAGE_CONFIGS)

_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def tiny_config(family: str, *, tied: bool = False, **overrides: object) -> PretrainedConfig:
    """A tiny configuration of `family` (one of `DECODERS` or `VISION_LANGUAGE`).

    Args:
        tied: whether the head shares the weight of the embeddings.
        overrides: fields of the (text) configuration.
    """
    if family in VISION_LANGUAGE:
        return VISION_LANGUAGE_CONFIGS[family](tied, overrides)
    class_name, own = _DECODERS[family]
    fields = {**TEXT, **own, "tie_word_embeddings": tied, **overrides}
    return getattr(transformers, class_name)(**fields)


_DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": ("Phi3Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": None}),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 2,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_dropout": 0.0}),
    "mixtral": ("MixtralConfig", {**_MOE, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
}
