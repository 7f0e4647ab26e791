"""Micro-batches for the tiny Mllama of tiny_models.py, with images of drawn shapes.

Shapes: B rows, T tokens, M images of the fullest row, N tiles.
"""

import torch

from tests.helpers.tiny_models import IMAGE_TOKEN_ID, NUM_TILES, VOCAB_SIZE

FIRST_TEXT_ID = 9  # below it are special tokens


def mllama_micro_batch(
    num_images: tuple[int, ...],
    *,
    length: int = 14,
    seed: int = 7,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Return one micro-batch with pixels; the last row is padded.

    Args:
        num_images: of each row; images of one to four tiles.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(num_images), length)
    ids_BT = torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, shape, generator=generator)
    for row, count in enumerate(num_images):
        for image in range(count):
            ids_BT[row, 1 + 3 * image] = IMAGE_TOKEN_ID
    mask_BT = torch.ones(shape, dtype=torch.long)
    mask_BT[-1, length - 3 :] = 0
    is_target_BT = torch.rand(shape, generator=generator) < 0.5
    is_target_BT[:, length // 2] = True
    is_target_BT &= mask_BT.bool() & (ids_BT >= FIRST_TEXT_ID)
    batch = {
        "input_ids": ids_BT.masked_fill(mask_BT == 0, 0),
        "attention_mask": mask_BT,
        "labels": torch.where(is_target_BT, ids_BT, -100),
    }
    if any(num_images):
        batch.update(_images(num_images, length, generator, dtype))
    return batch


def _images(
    num_images: tuple[int, ...], length: int, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the processor's output for images of drawn shapes, written down by hand."""
    shape = (len(num_images), max(num_images))
    tiles_of_id = (0, 1, 2, 3, 4, 2, 4, 3, 4)
    ids_BM = torch.zeros(shape, dtype=torch.long)
    tiles_BMN = torch.zeros(*shape, NUM_TILES, dtype=torch.long)
    tiles_BMN[:, :, 0] = 1
    pixels = torch.zeros(*shape, NUM_TILES, 3, 16, 16, dtype=dtype)
    seen_BTMN = torch.zeros(shape[0], length, shape[1], NUM_TILES, dtype=torch.long)
    for row, count in enumerate(num_images):
        for image in range(count):
            ratio = int(torch.randint(1, 9, (), generator=generator))
            tiles = tiles_of_id[ratio]
            ids_BM[row, image] = ratio
            tiles_BMN[row, image, :tiles] = 1
            drawn = torch.randn(tiles, 3, 16, 16, generator=generator)
            pixels[row, image, :tiles] = drawn.to(dtype)
            end = length if image == count - 1 else 4 + 3 * image
            seen_BTMN[row, 1 + 3 * image : end, image, :tiles] = 1
    return {
        "pixel_values": pixels,
        "aspect_ratio_ids": ids_BM,
        "aspect_ratio_mask": tiles_BMN,
        "cross_attention_mask": seen_BTMN,
    }
