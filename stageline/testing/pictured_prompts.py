"""Prompts with no, one and several pictures of noise, as a server gets them."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from PIL import Image

from stageline.data.batch import render_sample
from stageline.data.rendered import Rendered
from stageline.inference.generation import encode_prompts

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
    """One prompt for each entry of `SIZES`; prompt_fn and image_token are parts of the shelf."""
    prompts = []
    for place, (sizes, question) in enumerate(zip(SIZES, QUESTIONS, strict=True)):
        pictures = [_picture(size) for size in sizes]
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


def _picture(size: tuple[int, int]) -> Image.Image:
    generator = numpy.random.default_rng(sum(size))
    values = generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(values)
