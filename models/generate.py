"""The inference model parts: (images, prompts) -> answers."""

from collections.abc import Sequence
from typing import Any

import torch

from register import model_register
from stageline.data.rendered import Rendered
from stageline.inference import generation


@model_register("generate")
def generate(
    model: torch.nn.Module,
    processor: Any,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 50,
    repetition_penalty: float = 1.0,
) -> list[dict[str, Any]]:
    """The library's generate in batches with left padding, for text and images.

    Args:
        top_p: with a temperature: the likeliest tokens that hold this share.
        top_k: with a temperature: so many of the likeliest tokens.
        repetition_penalty: above 1 makes tokens that were there before less likely.
    """
    return generation.generate(
        model,
        processor,
        prompts=prompts,
        images=images,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
    )
