"""What a stage makes of a packed micro-batch: the library's own way to keep samples apart.

A decoder of the library that gets no attention mask reads the borders of samples off the position
ids, which restart there, and builds the mask of its attention kernel itself: whole rows for sdpa
and eager, cumulative lengths for flash attention (rows of one micro-batch: one). So only small
integers are in the micro-batch, and no mask crosses a border.

Shapes: B rows, T tokens, S samples of all rows, L tokens of the longest sample.
"""

from collections.abc import Callable

import torch

Batch = dict[str, torch.Tensor]
_PACKED_INPUTS = ("attention_mask", "sample_ids")


def is_packed(batch: Batch) -> bool:
    """Whether rows hold several samples."""
    return "sample_ids" in batch


def without_masks(batch: Batch) -> Batch:
    """The inputs without the mask that would hide the borders."""
    return {name: value for name, value in batch.items() if name not in _PACKED_INPUTS}


def multimodal_positions(
    batch: Batch, get_rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Position ids [4, B, T]: of the text, which show the borders, then time, height, width.

    Args:
        get_rope_index: the model's own; it is asked about the samples as rows of their own.
    """
    samples_BT, text_BT = batch["sample_ids"], batch["position_ids"]
    axes_3BT = torch.zeros(3, *text_BT.shape, dtype=text_BT.dtype, device=text_BT.device)
    is_real_BT = samples_BT >= 0
    if bool(is_real_BT.any()):
        row_N = is_real_BT.nonzero()[:, 0]
        _, sample_N = torch.stack((row_N, samples_BT[is_real_BT])).unique(
            dim=1, return_inverse=True
        )
        place_N = text_BT[is_real_BT]
        shape_SL = (int(sample_N.max()) + 1, int(place_N.max()) + 1)

        def unpack(values_BT: torch.Tensor) -> torch.Tensor:
            values_SL = values_BT.new_zeros(shape_SL)
            values_SL[sample_N, place_N] = values_BT[is_real_BT]
            return values_SL

        grids = {name: batch[name] for name in ("image_grid_thw",) if name in batch}
        alone_3SL, _ = get_rope_index(
            unpack(batch["input_ids"]),
            mm_token_type_ids=unpack(batch.get("mm_token_type_ids", torch.zeros_like(text_BT))),
            attention_mask=unpack(torch.ones_like(samples_BT)),
            **grids,
        )
        axes_3BT[:, is_real_BT] = alone_3SL[:, sample_N, place_N].to(axes_3BT)
    return torch.cat((text_BT[None], axes_3BT))
