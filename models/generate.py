"""Inference model components: (images, prompts) -> answers."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from register import model_register
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.inference.decoding.request import Failed, Request, Sampling


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
    """transformers' generate in left-padded batches, for text and images.

    A decoding engine (--engine pipeline or vllm) does the same with its own batches.

    Args:
        top_p: probability of the likeliest tokens that are sampled from, with a temperature.
        top_k: number of the likeliest tokens that are sampled from, with a temperature.
        repetition_penalty: above 1, earlier tokens become less likely.
    """
    from stageline.inference import generation

    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
    }
    if not isinstance(model, torch.nn.Module):
        return engine_answers(
            model, processor, prompts=prompts, images=images, sampling=Sampling(**options)
        )
    return generation.generate(model, processor, prompts=prompts, images=images, **options)


def engine_answers(
    engine: Any,
    processor: Any,
    *,
    prompts: Sequence[Rendered],
    images: Sequence[Any],
    sampling: Sampling,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answer each prompt; encode it, pictures too, when the engine has room for it.

    Each prompt has a seed of its own, which follows from that of `sampling`, its name and its text
    (not from its place, which changes where a run is resumed or shared out).

    Yields:
        (place, answer) as answers are done: text, token_ids (without the stop token) and
        finish_reason, or `error` alone.
    """
    from stageline.inference.generation import encode_prompts, failed_answer

    tokenizer = get_tokenizer(processor)
    # an engine with its own image processors defines the form of a prompt
    own = getattr(engine, "encode", None)

    def request(place: int, prompt: Rendered, row: Any) -> Request:
        words = repr((sampling.seed, prompt.name, prompt.text)).encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 1  # signed
        ids = own(prompt, row) if own else encode_prompts([prompt], [row], processor=processor)
        is_sampled = sampling.temperature > 0
        return Request(str(place), ids, replace(sampling, seed=seed) if is_sampled else sampling)

    pairs = enumerate(zip(prompts, images, strict=True))
    for found in engine.answer(request(place, *pair) for place, pair in pairs):
        if isinstance(found, Failed):
            yield int(found.key), failed_answer(found)
            continue
        token_ids = list(found.token_ids)
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        answer = {"text": text, "token_ids": token_ids, "finish_reason": found.reason}
        yield int(found.key), answer
