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
# key -> name of the stage class, model types that it serves
VISION_LANGUAGE_MODELS: dict[str, tuple[str, tuple[str, ...]]] = {}
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
    key: str,
    stage_class: str,
    text: str,
    *,
    model_types: tuple[str, ...] = (),
    has_experts: bool = False,
    **facts: Any,
) -> None:
    """Registers a stage class under `key`.

    Args:
        model_types: of the configurations that it serves; none: any.
        has_experts: options for the loss of the routers come on top.
        facts: what the register keeps beside the part.
    """
    limits = {"model_types": model_types} if model_types else {}

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
        return dense(
            attn_implementation=attn_implementation,
            output_router_logits=output_router_logits,
            router_aux_loss_coef=router_aux_loss_coef,
            **kwargs,
        )

    part = mixture if has_experts else dense
    arguments = "attn_implementation: eager, sdpa or another of the library's."
    part.__doc__ = f"{text}\n\nArgs:\n    {arguments}{ROUTER_OPTIONS if has_experts else ''}"
    part.__name__ = part.__qualname__ = key
    part.__module__ = __name__
    # export.py looks for the key that serves a folder
    train_model_register.register(key, part, **limits, **facts)


def add_decoder(key: str, model_type: str | None = None, *, has_experts: bool = False) -> None:
    """A decoder-only model of one architecture."""
    text = f"The {key} decoder; refuses any other architecture."
    types = (model_type or key,)
    add_part(key, "CausalLMStage", text, model_types=types, has_experts=has_experts)


def add_vision(key: str, *model_types: str, stage_class: str = "VisionLanguageStage") -> None:
    """A vision-language model of one architecture."""
    types = model_types or (key,)
    VISION_LANGUAGE_MODELS[key] = (stage_class, types)
    text = f"The vision-language model {key}; refuses any other architecture."
    add_part(key, stage_class, text, model_types=types)


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


ANY_DECODER = "Any decoder-only model of transformers, split by layers."
ANY_REWARD = "A reward model on any decoder of transformers: scores in the place of logits."
add_part("causal_lm", "CausalLMStage", ANY_DECODER, has_experts=True)
add_part("reward", "RewardStage", ANY_REWARD, has_experts=True, gives_scores=True)
add_decoder("llama")
add_decoder("mistral")
add_decoder("qwen2")
add_decoder("qwen3")
add_decoder("gemma2")
add_decoder("gemma3", "gemma3_text")
add_decoder("phi3")
add_decoder("gpt2")
add_decoder("gpt_neox")
add_decoder("mixtral", has_experts=True)
add_decoder("qwen3_moe", has_experts=True)
add_vision("internvl")
add_vision("llava")
add_vision("llava_next")
add_vision("qwen2_vl")
add_vision("qwen2_5_vl")
add_vision("qwen3_vl")
add_vision("qwen3_vl_moe")
add_vision("qwen3_5")
add_vision("aya_vision")
add_vision("gemma4")
add_vision("glm4v")
add_vision("idefics2")
add_vision("llava_onevision")
add_vision("mistral3")
add_vision("paligemma")
# first: export.py takes the first key that serves a folder
add_vision("smolvlm")
add_vision("idefics3", "idefics3", "smolvlm")
add_vision("gemma3_vl", "gemma3", stage_class="Gemma3VisionStage")
add_vision("mllama", stage_class="CrossAttentionStage")
