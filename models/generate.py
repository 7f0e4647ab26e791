"""The inference model parts: (images, prompts) -> answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from register import model_register

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stageline.data.text.rendered import Rendered


@model_register("generate")
def generate(
    model: Any,
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
) -> list[dict[str, Any]] | Iterator[tuple[int, dict[str, Any]]]:
    """The library's generate in batches with left padding, for text and images.

    A decoding engine (--engine pipeline or vllm) does the same, batching by itself.

    Args:
        top_p: with a temperature: the likeliest tokens that hold this share.
        top_k: with a temperature: so many of the likeliest tokens.
        repetition_penalty: above 1 makes tokens that were there before less likely.
    """
    import torch

    from stageline.inference import generation
    from stageline.inference.decoding.request import Sampling

    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
    }
    if not isinstance(model, torch.nn.Module):
        return generation.engine_answers(
            model, processor, prompts=prompts, images=images, sampling=Sampling(**options)
        )
    return generation.generate(model, processor, prompts=prompts, images=images, **options)
