"""A whole model on the meta device, where only names, shapes and bytes exist; loads nothing."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from stageline.errors import UserError


def auto_class_of(config: PretrainedConfig) -> Any:
    """The library's class that builds the model of a config."""
    is_visual = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if is_visual else AutoModelForCausalLM


def model_on_meta(
    config: PretrainedConfig, *, dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a config, without weights.

    Args:
        options: of the library's `from_config`, such as trust_remote_code.
    """
    given = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return auto_class_of(config).from_config(config, **given, **options).eval()


def layers_path(model: nn.Module) -> str:
    """Where the list of decoder layers lies.

    Raises:
        UserError: there is not exactly one beside the token embeddings.
    """
    text_model = text_model_path(model)
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        f"{text_model}.{name}".lstrip(".")
        for name, child in model.get_submodule(text_model).named_children()
        if isinstance(child, nn.ModuleList) and len(child) == wanted
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(found)} lists of {wanted} layers beside "
            "its embeddings, one was expected: use --num-devices 1, or a builder part of your "
            "own that makes the device_map."
        )
    return found[0]


def text_model_path(model: nn.Module) -> str:
    """The module that has the token embeddings as its child."""
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(model.get_input_embeddings())].rpartition(".")[0]


def blocks_path(model: nn.Module) -> str | None:
    """Where the list of blocks of a vision tower lies; None where they must stay together.

    Towers that join what several blocks made, Mllama's for instance, do so on one device.
    """
    config = model.config
    joins = isinstance(getattr(config, "vision_feature_layer", None), list | tuple)
    looks = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None)
    if getattr(config, "vision_config", None) is None or joins or looks:
        return None
    text_model = text_model_path(model)
    found = {
        name: sum(parameter.numel() for parameter in blocks.parameters())
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and not name.startswith(f"{text_model}.")
    }
    return max(found, key=found.__getitem__) if found else None
