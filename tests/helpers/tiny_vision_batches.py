"""Micro-batches with 0, 1 and several images in a row, made by real processors and collate.

Tiles, side inputs and padded numbers of tiles come from the same data path as in training.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from PIL import Image

from stageline.data.batches.collate import collate_sft
from stageline.data.text.rendered import Rendered

MicroBatch = dict[str, torch.Tensor]
Size = tuple[int, int]
# width and height of the images of each row of each micro-batch; some fill several tiles, some
# are so flat or narrow that padding around them is taken away again
MIXED: tuple[tuple[tuple[Size, ...], ...], ...] = (
    (((20, 30),), (), ((48, 12), (16, 16))),
    ((), ()),
    (((12, 64), (33, 16), (16, 16)), ((16, 16),)),
)


def vision_micro_batches(
    processor: Any,
    *,
    prompt_fn: Callable[..., Rendered],
    image_token: Callable[..., Rendered],
    shapes: Sequence[Sequence[Sequence[Size]]] = MIXED,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[int, Image.Image], Image.Image] = lambda _, image: image,
) -> list[MicroBatch]:
    """Return one micro-batch for each entry of `shapes`, as stage 0 gets it.

    Args:
        prompt_fn, image_token: built-in components; the engine has none of its own.
        dtype: of the pixels.
        change: (number of the image, picture) -> the picture to take.
    """
    pictures = _Pictures(seed, change)
    micro_batches = []
    for rows in shapes:
        samples = [(pictures.row(row), _sample(number)) for number, row in enumerate(rows)]
        batch = collate_sft(
            samples,
            prompt="[IMAGE]\n[QUESTION]\nAnswer: [ANSWER]",
            prompt_fn=prompt_fn,
            image_token=image_token,
            processor=processor,
            pad_token_id=0,
            max_token_num=512,
            stage=0,
        )
        micro_batches.append(
            {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in batch.items()
            }
        )
    return micro_batches


class _Pictures:
    """Draws pictures of noise, numbered from 0 on."""

    def __init__(self, seed: int, change: Callable[[int, Image.Image], Image.Image]) -> None:
        self.generator = numpy.random.default_rng(seed)
        self.change = change
        self.count = 0

    def row(self, sizes: Sequence[Size]) -> list[Image.Image]:
        return [self._picture(size) for size in sizes]

    def _picture(self, size: Size) -> Image.Image:
        values = self.generator.integers(1, 256, (size[1], size[0], 3), dtype=numpy.uint8)
        self.count += 1
        return self.change(self.count - 1, Image.fromarray(values))


def _sample(number: int) -> dict[str, str]:
    return {"id": str(number), "question": f"Which digit is this? {number}", "answer": f"{number}7"}
