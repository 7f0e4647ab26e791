"""Ragged micro-batches for the tiny models, with images where the family wants them."""

import torch

from stageline.verify.batches import drop_pixels as drop_pixels
from tests.helpers.tiny_models import IMAGE_TOKEN_ID, VISION_LANGUAGE, VOCAB_SIZE

MicroBatch = dict[str, torch.Tensor]
FIRST_TEXT_ID = 9  # below it are special tokens


def tiny_micro_batches(
    family: str,
    *,
    lengths: tuple[int, ...] = (14, 11, 19, 12),
    rows: int = 2,
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
) -> list[MicroBatch]:
    """Return one micro-batch per length; the last row is padded, target counts differ widely.

    Pixels are in every micro-batch; `drop_pixels` takes them out for later stages.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        _micro_batch(family, length, rows, index, generator, dtype)
        for index, length in enumerate(lengths)
    ]


def count_targets(micro_batches: list[MicroBatch]) -> int:
    """Supervised tokens that have a token before them."""
    return int(sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches))


def join_micro_batches(micro_batches: list[MicroBatch]) -> MicroBatch:
    """Return all rows as one batch, padded to the longest."""
    width = max(batch["input_ids"].shape[1] for batch in micro_batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    fill |= {"mm_token_type_ids": 0, "token_type_ids": 0}
    joined = {}
    for name in micro_batches[0]:
        tensors = [batch[name] for batch in micro_batches]
        if name in fill:
            tensors = [
                torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill[name])
                for t in tensors
            ]
        joined[name] = torch.cat(tensors)
    return joined


def _micro_batch(
    family: str,
    length: int,
    rows: int,
    index: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> MicroBatch:
    shape = (rows, length)
    ids = torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, shape, generator=generator)
    batch: MicroBatch = {}
    if family in VISION_LANGUAGE:
        batch.update(_put_images(family, ids, generator, dtype))
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, length - 3 :] = 0
    share = 0.2 + 0.6 * (index % 2)
    is_target = torch.rand(shape, generator=generator) < share
    is_target[:, 8] = True
    is_target &= mask.bool() & (ids >= FIRST_TEXT_ID)
    ids[mask == 0] = 0
    batch["input_ids"] = ids
    batch["attention_mask"] = mask
    batch["labels"] = torch.where(is_target, ids, -100)
    return batch


def _put_images(
    family: str, ids: torch.Tensor, generator: torch.Generator, dtype: torch.dtype
) -> MicroBatch:
    """Writes one image of 4 tokens into each row, in place; returns its pixels and side inputs."""
    rows = ids.shape[0]

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    if family.startswith("qwen"):
        ids[:, 1] = 7
        ids[:, 2:6] = IMAGE_TOKEN_ID
        ids[:, 6] = 8
        return {
            "pixel_values": pixels(16 * rows, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
            "mm_token_type_ids": (ids == IMAGE_TOKEN_ID).long(),
        }
    ids[:, 2:6] = IMAGE_TOKEN_ID
    if family in ("idefics3", "smolvlm"):
        return {
            "pixel_values": pixels(rows, 1, 3, 16, 16),
            "pixel_attention_mask": torch.ones(rows, 1, 16, 16, dtype=torch.bool),
        }
    if family == "llava_next":  # so flat that of its tiles only the overview has tokens
        sizes = torch.tensor([[2, 24]] * rows)
        return {"pixel_values": pixels(rows, 3, 3, 16, 16), "image_sizes": sizes}
    batch = {"pixel_values": pixels(rows, 3, 16, 16)}
    if family == "gemma3_vl":
        batch["token_type_ids"] = (ids == IMAGE_TOKEN_ID).long()
    return batch
