"""Train_model components: each builds and fills one stage of a model.

The stage classes are in stageline/stages, and for a subclass of one's own in pp_models.py. They
import transformers, so they are imported when a part is called.
"""

import functools
from typing import Any

from register import train_model_register

Built = tuple[Any, Any, int]  # stage model, processor, id of the padding token
# keys that are a generic part for one architecture, and the model types in config.json that they
# take where the key is not the name of one; export.py takes the first key that serves a folder
FAMILIES = {
    "causal_lm": (
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"),
        *("mixtral", "qwen3_moe"),
    ),
    "vision_language": (
        *("internvl", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_5", "aya_vision", "gemma4", "glm4v", "idefics2", "llava_onevision", "mistral3"),
        *("paligemma", "smolvlm", "idefics3", "gemma3_vl", "mllama"),
    ),
}
MODEL_TYPES = {"gemma3": ("gemma3_text",), "idefics3": ("idefics3", "smolvlm")}
MODEL_TYPES["gemma3_vl"] = ("gemma3",)
OWN_STAGES = {"gemma3": "gemma3_vl", "mllama": "mllama"}  # model type -> key


def class_of_key(key: str) -> type:
    """Return the stage class that a key of this file builds."""
    from stageline.stages import causal_lm as text
    from stageline.stages import vision_language as vision

    classes: dict[str, type] = {
        "causal_lm": text.CausalLMStage,
        "reward": text.RewardStage,
        "vision_language": vision.VisionLanguageStage,
        "gemma3_vl": vision.Gemma3VisionStage,
        "mllama": vision.CrossAttentionStage,
    }
    generic = next((part for part, keys in FAMILIES.items() if key in keys), key)
    return classes[key if key in classes else generic]


def stage_class_of(model_type: str) -> type:
    """Return the vision-language stages of an architecture; the generic ones without its own."""
    return class_of_key(OWN_STAGES.get(model_type, "vision_language"))


@train_model_register("causal_lm")
def causal_lm(
    *,
    attn_implementation: str | None = None,
    output_router_logits: bool | None = None,
    router_aux_loss_coef: float | None = None,
    **kwargs: Any,
) -> Built:
    """Any decoder-only model of transformers, split by layers.

    Args:
        attn_implementation: attention of transformers: eager, sdpa or another name.
        output_router_logits: add the load-balancing loss of a mixture of experts; default: the
            field of config.json.
        router_aux_loss_coef: weight of that loss; default: the field of config.json.
    """
    return class_of_key("causal_lm").build(
        attn_implementation=attn_implementation,
        output_router_logits=output_router_logits,
        router_aux_loss_coef=router_aux_loss_coef,
        **kwargs,
    )


@train_model_register("reward", gives_scores=True)
def reward(
    *,
    attn_implementation: str | None = None,
    output_router_logits: bool | None = None,
    router_aux_loss_coef: float | None = None,
    **kwargs: Any,
) -> Built:
    """A reward model on any decoder of transformers, with scores in place of logits.

    Args:
        attn_implementation: attention of transformers: eager, sdpa or another name.
        output_router_logits: as in causal_lm.
        router_aux_loss_coef: as in causal_lm.
    """
    return class_of_key("reward").build(
        attn_implementation=attn_implementation,
        output_router_logits=output_router_logits,
        router_aux_loss_coef=router_aux_loss_coef,
        **kwargs,
    )


@train_model_register("vision_language")
def vision_language(*, attn_implementation: str | None = None, **kwargs: Any) -> Built:
    """Any vision-language model of transformers with one list of decoder layers.

    An architecture with stages of its own gets the same stages as by its key.

    Args:
        attn_implementation: attention of transformers: eager, sdpa or another name.
    """
    from stageline.model_folder import load_config

    path = kwargs.get("config_path") or kwargs.get("checkpoint_path")
    stage_class = class_of_key("vision_language")
    if path is not None:
        config = load_config(path, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        stage_class = stage_class_of(config.model_type)
    return stage_class.build(attn_implementation=attn_implementation, **kwargs)


for generic, keys in FAMILIES.items():
    for key in keys:
        types = MODEL_TYPES.get(key, (key,))
        part = functools.partial(train_model_register[generic], model_types=types)
        part.__doc__ = f"{generic} for {' and '.join(types)}; refuses any other architecture."
        train_model_register.register(key, part, model_types=types)
