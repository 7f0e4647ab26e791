"""Prompts with no, one and several pictures of noise, and tiny models that look at them."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from PIL import Image
from transformers import PretrainedConfig

from stageline.data.batches.batch import render_sample
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.inference.generation import encode_prompts
from tests.helpers.tiny_models import (
    tiny_config,
    tiny_mllama_config,
    tiny_mllama_processor,
    tiny_processor,
)

# width, height of each prompt's pictures
SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((20, 30),),
    (),
    ((64, 33), (16, 16)),
    ((40, 90),),
)
QUESTIONS = ("Which digit?", "Is the cat left of the dog, yes or no?", "What is it?", "true")


def pictured_prompts(
    processor: Any, *, prompt_fn: Callable[..., Rendered], image_token: Callable[..., Rendered]
) -> list[dict[str, torch.Tensor]]:
    """Return one prompt for each entry of `SIZES`; both functions are built-in components."""
    prompts = []
    for place, (sizes, question) in enumerate(zip(SIZES, QUESTIONS, strict=True)):
        pictures = [picture(size) for size in sizes]
        rendered = render_sample(
            pictures,
            {"id": str(place), "question": question, "answer": ""},
            prompt="[IMAGE]\n[QUESTION][ANSWER]",
            prompt_fn=prompt_fn,
            image_token=image_token,
            processor=processor,
            for_generation=True,
        )
        prompts.append(encode_prompts([rendered], [pictures], processor=processor))
    return prompts


def picture(size: tuple[int, int]) -> Image.Image:
    """Noise of a width and height, the same each time."""
    generator = numpy.random.default_rng(sum(size))
    values = generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def tiny_parts(family: str) -> tuple[Any, PretrainedConfig]:
    """A processor and a configuration of a tiny vision-language model that fit each other."""
    if family == "mllama":
        processor, make = tiny_mllama_processor(), tiny_mllama_config
    else:
        processor, make = tiny_processor(family), lambda **fields: tiny_config(family, **fields)
    size = len(get_tokenizer(processor))
    return processor, make(vocab_size=size, max_position_embeddings=1024)
