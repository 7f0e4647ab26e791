"""Tiny configurations of vision-language architectures; what an image becomes has 4 tokens.

Towers see tiles of 16 x 16 pixels, so that they fit tiny_processors.py.
"""

from collections.abc import Callable

import transformers
from transformers import PretrainedConfig

from stageline.testing.tiny_fields import IMAGE_TOKEN_ID, TEXT


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
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 16,
    }
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config={
            "model_type": "llama",
            **TEXT,
            "tie_word_embeddings": tied,
            **overrides,
        },
        image_token_index=IMAGE_TOKEN_ID,
        tie_word_embeddings=tied,
    )


def _qwen2_5_vl(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    return transformers.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={
            **TEXT,
            "rope_parameters": rope,
            "tie_word_embeddings": tied,
            **overrides,
        },
        image_token_id=IMAGE_TOKEN_ID,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
        tie_word_embeddings=tied,
    )


def _idefics3(tied: bool, overrides: dict[str, object]) -> PretrainedConfig:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    return transformers.Idefics3Config(
        vision_config=vision,
        text_config={
            "model_type": "llama",
            **TEXT,
            "tie_word_embeddings": tied,
            **overrides,
        },
        image_token_id=IMAGE_TOKEN_ID,
        scale_factor=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


VISION_LANGUAGE_CONFIGS: dict[str, Callable[[bool, dict[str, object]], PretrainedConfig]] = {
    "internvl": _internvl,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "idefics3": _idefics3,
}
