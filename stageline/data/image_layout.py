"""How a processor joins the pixels of single images to a batch; learnt by trial, to the bit.

Processors pad and stack in their own ways. A way is only used if it gives, for pictures of noise,
exactly what the processor gives for all of them at once.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy
import torch
from PIL import Image

Layout = Literal["images", "rows"]
Pixels = dict[str, torch.Tensor]  # the inputs of one image whose names begin with "pixel"
LAYOUTS: tuple[Layout, ...] = ("images", "rows")
_TRIAL_SIZES = ((((60, 40),), (), ((50, 170), (64, 64))), (((90, 30), (30, 32)), ((31, 70),)))


def find_layout(process: Callable[[Sequence[Sequence[Any]]], Pixels]) -> Layout | None:
    """The layout of a processor; None: it is none of those known here.

    Args:
        process: rows of images -> the pixels of all of them.
    """
    trials = [_trial(process, sizes, seed) for seed, sizes in enumerate(_TRIAL_SIZES)]
    for layout in LAYOUTS:
        if all(is_equal(_tried(rows, layout), whole) for rows, whole in trials):
            return layout
    return None


def join_pixels(rows: Sequence[Sequence[Pixels]], layout: Layout) -> Pixels:
    """The pixels of a batch.

    Args:
        rows: the images of each row; at least one row has some.
        layout: "images": dim 0 is images, or their tiles or patches, one after the other;
            "rows": dim 0 is rows, dim 1 the images of a row. Smaller ones are filled with zeros.
    """
    names = next(image for row in rows for image in row).keys()
    if layout == "images":
        return {name: _cat([image[name] for row in rows for image in row]) for name in names}
    joined = {}
    for name in names:
        first = next(image[name] for row in rows for image in row)
        none = first.new_zeros((1, 0, *first.shape[2:]))
        joined[name] = _cat([_cat([image[name] for image in row] or [none], dim=1) for row in rows])
    return joined


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Joins along `dim`, with zeros where a tensor is smaller in another one."""
    if len(tensors) == 1:
        return tensors[0]
    if all(tensor.shape[1:] == tensors[0].shape[1:] for tensor in tensors) and dim == 0:
        return torch.cat(list(tensors))
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    joined = tensors[0].new_zeros(shape)
    start = 0
    for tensor in tensors:
        place = [slice(0, size) for size in tensor.shape]
        place[dim] = slice(start, start + tensor.shape[dim])
        joined[tuple(place)] = tensor
        start += tensor.shape[dim]
    return joined


def _trial(
    process: Callable[[Sequence[Sequence[Any]]], Pixels],
    sizes: Sequence[Sequence[tuple[int, int]]],
    seed: int,
) -> tuple[list[list[Pixels]], Pixels]:
    generator = numpy.random.default_rng(seed)
    rows = [
        [
            Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8))
            for width, height in row
        ]
        for row in sizes
    ]
    return [[process([[image]]) for image in row] for row in rows], process(rows)


def _tried(rows: Sequence[Sequence[Pixels]], layout: Layout) -> Pixels:
    try:
        return join_pixels(rows, layout)
    except (RuntimeError, ValueError, IndexError):  # it does not even fit
        return {}


def is_equal(found: Pixels, expected: Pixels) -> bool:
    """Whether both have the same names, types, shapes and values."""
    return set(found) == set(expected) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in expected.items()
    )
