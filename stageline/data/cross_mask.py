"""The mask of which token sees which image, of models whose layers attend to images.

Shapes: B rows, T tokens, M images of the fullest row, S tiles an image.
"""

import torch

CROSS_MASK = "cross_attention_mask"


def grow_cross_mask(mask_BTMS: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The mask with `count` more tokens at the end, which see what the last one sees."""
    more = mask_BTMS[:, -1:].expand(-1, count, -1, -1)
    return torch.cat([mask_BTMS, more], dim=1)
