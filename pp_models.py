"""The train_model parts: each builds and fills one stage of a model.

The classes lie in stageline/stages and are imported when a part is called, or by name from here:
`from pp_models import CausalLMStage`. A new architecture is a subclass: see docs/add_a_model.md.
"""

from __future__ import annotations

import importlib
from typing import Any

from register import train_model_register

STAGE_CLASSES = {
    "StageModel": "stageline.stages.base",
    "CausalLMStage": "stageline.stages.causal_lm",
    "RewardStage": "stageline.stages.causal_lm",
    "VisionLanguageStage": "stageline.stages.vision_language",
    "Gemma3VisionStage": "stageline.stages.vision_language",
    "CrossAttentionStage": "stageline.stages.vision_language",
}
# key -> the model type that it serves; all others are refused
DECODERS = {key: key for key in ("llama", "mistral", "qwen2", "qwen3", "gemma2")}
DECODERS |= {"gemma3": "gemma3_text"}
DECODERS |= {key: key for key in ("phi3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe")}
MIXTURES = ("mixtral", "qwen3_moe", "causal_lm", "reward")  # keys with options for routers
# key -> name of the stage class, model types that it serves
VISION_LANGUAGE_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    key: ("VisionLanguageStage", (key,))
    for key in (
        *("internvl", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_5", "aya_vision", "gemma4", "glm4v", "idefics2", "llava_onevision", "mistral3"),
        *("paligemma", "smolvlm"),
    )
}
VISION_LANGUAGE_MODELS |= {  # behind smolvlm: export.py takes the first key that serves a folder
    "idefics3": ("VisionLanguageStage", ("idefics3", "smolvlm")),
    "gemma3_vl": ("Gemma3VisionStage", ("gemma3",)),
    "mllama": ("CrossAttentionStage", ("mllama",)),
}
ROUTER_OPTIONS = """
    output_router_logits: train the load-balancing loss of a mixture of experts too; default: what
        config.json says under this name.
    router_aux_loss_coef: weight of that loss; default: what config.json says."""


def __getattr__(name: str) -> Any:
    if name in STAGE_CLASSES:
        return _stage_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _stage_class(name: str) -> Any:
    return getattr(importlib.import_module(STAGE_CLASSES[name]), name)


def class_of_key(key: str) -> type:
    """The stages that a key of this file builds."""
    return _stage_class(VISION_LANGUAGE_MODELS.get(key, ("CausalLMStage",))[0])


def stage_class_of(model_type: str) -> type:
    """The vision-language stages of an architecture; the generic ones where it has none."""
    found = (name for name, types in VISION_LANGUAGE_MODELS.values() if model_type in types)
    return _stage_class(next(found, "VisionLanguageStage"))


def add_part(
    key: str, stage_class: str, text: str, *, model_types: tuple[str, ...] = (), **facts: Any
) -> None:
    """Registers a stage class under `key`.

    Args:
        model_types: of the configurations that it serves; none: any.
        facts: what the register keeps beside the part.
    """
    limits = {"model_types": model_types} if model_types else {}
    has_experts = key in MIXTURES

    def dense(*, attn_implementation: str | None = None, **kwargs: Any) -> tuple[Any, Any, int]:
        return _stage_class(stage_class).build(
            attn_implementation=attn_implementation, **limits, **kwargs
        )

    def mixture(
        *,
        attn_implementation: str | None = None,
        output_router_logits: bool | None = None,
        router_aux_loss_coef: float | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, int]:
        routers = {
            "output_router_logits": output_router_logits,
            "router_aux_loss_coef": router_aux_loss_coef,
        }
        return dense(attn_implementation=attn_implementation, **routers, **kwargs)

    part = mixture if has_experts else dense
    arguments = "attn_implementation: eager, sdpa or another of the library's."
    part.__doc__ = f"{text}\n\nArgs:\n    {arguments}{ROUTER_OPTIONS if has_experts else ''}"
    part.__name__ = part.__qualname__ = key
    part.__module__ = __name__
    # export.py looks for the key that serves a folder
    train_model_register.register(key, part, **limits, **facts)


@train_model_register("vision_language")
def vision_language(
    *, attn_implementation: str | None = None, **kwargs: Any
) -> tuple[Any, Any, int]:
    """Any vision-language model of transformers with one list of decoder layers.

    An architecture with a key of its own gets the same stages as by that key.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
    """
    from stageline.model_folder import load_config

    path = kwargs.get("config_path") or kwargs.get("checkpoint_path")
    stage_class = _stage_class("VisionLanguageStage")
    if path is not None:
        config = load_config(path, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        stage_class = stage_class_of(config.model_type)
    return stage_class.build(attn_implementation=attn_implementation, **kwargs)


ANY_REWARD = "A reward model on any decoder of transformers: scores in the place of logits."
add_part("causal_lm", "CausalLMStage", "Any decoder-only model of transformers, split by layers.")
add_part("reward", "RewardStage", ANY_REWARD, gives_scores=True)
for name, model_type in DECODERS.items():
    told = f"The {name} decoder; refuses any other architecture."
    add_part(name, "CausalLMStage", told, model_types=(model_type,))
for name, (stages, model_types) in VISION_LANGUAGE_MODELS.items():
    told = f"The vision-language model {name}; refuses any other architecture."
    add_part(name, stages, told, model_types=model_types)
