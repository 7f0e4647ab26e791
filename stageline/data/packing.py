"""Packed micro-batches: several samples behind each other in one row, none of which sees another.

Attention is block-diagonal by small integers: positions restart at each sample, and each stage
builds its mask from them. Shapes: B rows, T tokens of the fullest one.
"""

from collections.abc import Sequence

import torch

from stageline.data.batch import IGNORE, row_width
from stageline.data.encode import Encoded

NO_SAMPLE = -1
_EMPTY_ROW = 2  # one token has no next one to predict, which not every loss allows for


def pack_rows(
    rows: Sequence[Sequence[Encoded]],
    *,
    pad_token_id: int,
    multiple_of: int = 1,
    max_width: int | None = None,
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels, position_ids and sample_ids, each [B, T] long.

    `sample_ids` counts the samples of a row, -1 is padding; their presence tells a stage that the
    batch is packed. Padding has position 0 throughout: each such token is a sample of its own, so
    it sees itself alone. An empty row is padding only.

    Args:
        multiple_of, max_width: as in `row_width`.
    """
    longest = max(max((sum(map(len, row)) for row in rows), default=0), _EMPTY_ROW)
    shape = (len(rows), row_width(longest, multiple_of=multiple_of, max_width=max_width))
    ids_BT = torch.full(shape, pad_token_id, dtype=torch.long)
    mask_BT = torch.zeros(shape, dtype=torch.long)
    labels_BT = torch.full(shape, IGNORE, dtype=torch.long)
    positions_BT = torch.zeros(shape, dtype=torch.long)
    samples_BT = torch.full(shape, NO_SAMPLE, dtype=torch.long)
    for index, row in enumerate(rows):
        end = 0
        for number, sample in enumerate(row):
            place, end = slice(end, end + len(sample)), end + len(sample)
            sample_ids = torch.tensor(sample.input_ids, dtype=torch.long)
            ids_BT[index, place] = sample_ids
            mask_BT[index, place] = 1
            is_target = torch.tensor(sample.is_target, dtype=torch.bool)
            is_target[0] = False  # the token before it belongs to another sample
            labels_BT[index, place] = torch.where(is_target, sample_ids, IGNORE)
            positions_BT[index, place] = torch.arange(len(sample))
            samples_BT[index, place] = number
    return {
        "input_ids": ids_BT,
        "attention_mask": mask_BT,
        "labels": labels_BT,
        "position_ids": positions_BT,
        "sample_ids": samples_BT,
    }


def count_samples(micro_batch: dict[str, torch.Tensor]) -> int:
    """Samples with something to learn: rows, pairs of them, or the samples in packed ones."""
    is_target_BT = micro_batch["labels"] != IGNORE
    if "loss_pairs" in micro_batch:
        is_target_BT = is_target_BT[::2]
    if "sample_ids" not in micro_batch:
        return int(is_target_BT.any(dim=1).sum())
    samples_BT = micro_batch["sample_ids"]
    rows_BT = torch.arange(len(samples_BT), device=samples_BT.device)[:, None].expand_as(samples_BT)
    pairs = torch.stack((rows_BT[is_target_BT], samples_BT[is_target_BT]))
    return pairs.unique(dim=1).shape[1]
