"""Tiny configurations of real architectures, for parity tests: seconds on a CPU, all of the code.

Each has 4 layers, so that 1 to 4 stages can be tried, and no dropout.
"""

import transformers
from transformers import PretrainedConfig

from stageline.testing.tiny_fields import IMAGE_TOKEN_ID, TEXT, VOCAB_SIZE
from stageline.testing.tiny_vision_models import VISION_LANGUAGE_CONFIGS

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
