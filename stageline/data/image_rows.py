"""Image inputs that lie by rows: of models whose layers attend to images (Mllama).

Their processor gives [rows, images of the fullest row, ...] and a mask of which token sees which
image. Rows and token places are known on every rank, so both are made here, without pixels.

Shapes: N images of a micro-batch, B rows, M images of the fullest row, T tokens, S tiles an image.
"""

from collections.abc import Sequence
from typing import Any

import torch

from stageline.data.cross_mask import CROSS_MASK

TILES = "aspect_ratio_mask"


def lies_in_rows(processor: Any) -> bool:
    """Whether this processor lays images out by rows."""
    return CROSS_MASK in getattr(processor, "model_input_names", ())


def by_image(output: dict[str, Any]) -> dict[str, Any]:
    """The processor's output of one row, with dim 0 for images in the place of rows."""
    if CROSS_MASK not in output:
        return output
    return {
        name: value[0] if isinstance(value, torch.Tensor) else value
        for name, value in output.items()
        if name != CROSS_MASK
    }


def by_rows(
    batch: dict[str, torch.Tensor], counts: Sequence[int], *, processor: Any
) -> dict[str, torch.Tensor]:
    """The image inputs [B, M, ...] of a micro-batch that has them [N, ...], and the mask of tokens.

    Args:
        batch: with input_ids and what is there of images.
        counts: images of each row.
    """
    if TILES not in batch:
        return {}
    from transformers.models.mllama import processing_mllama as library  # not for other models

    names = [name for name in batch if name.startswith(("pixel", "aspect_ratio"))]
    laid = {name: _lay(batch[name], counts) for name in names}
    # the library lets images that are not there have one tile, so that no softmax is over nothing
    laid[TILES][:, :, 0] = 1
    tiles = batch[TILES].sum(-1).split(list(counts))
    dense = library.convert_sparse_cross_attention_mask_to_dense(
        [
            library.get_cross_attention_token_mask(row, processor.image_token_id)
            for row in batch["input_ids"].tolist()
        ],
        num_tiles=[row.tolist() for row in tiles],
        max_num_tiles=batch[TILES].shape[-1],
        length=batch["input_ids"].shape[1],
    )
    return {**laid, CROSS_MASK: torch.from_numpy(dense)}


def _lay(value_N: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    laid_BM = value_N.new_zeros(len(counts), max(counts), *value_N.shape[1:])
    for row, images in enumerate(value_N.split(list(counts))):
        laid_BM[row, : len(images)] = images
    return laid_BM
