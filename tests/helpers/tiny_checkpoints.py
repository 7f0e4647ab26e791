"""Tiny whole models with weights that hide no mistake, saved by the library itself."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config

SHARD_SIZE = "20KB"  # several files even for a tiny model


def auto_class(family: str) -> type:
    """The library's class that builds a whole model of a tiny family."""
    if family in VISION_LANGUAGE:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def tiny_whole(
    family: str,
    folder: Path | None = None,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = SHARD_SIZE,
    noise: float = 0.05,
    **overrides: object,
) -> PreTrainedModel:
    """A whole model in evaluation mode, saved to `folder` by plain `save_pretrained`.

    The library starts biases and norms at 0 and 1, which hides weights that were swapped or left
    out: here they are moved.

    Args:
        noise: how far; more makes answers that differ more from prompt to prompt.
        overrides: fields of the (text) configuration.
    """
    torch.manual_seed(3)
    whole = auto_class(family).from_config(tiny_config(family, tied=tied, **overrides), dtype=dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    if folder is not None:
        whole.save_pretrained(folder, max_shard_size=max_shard_size)
    return whole.eval()
