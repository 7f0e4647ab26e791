"""Makes one micro-batch for supervised fine-tuning; the bodies of the `sft` collate part.

Token ids are the same on every rank; pixels are decoded on the first stage alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stageline.data.batch import (
    Images,
    Sample,
    add_image_inputs,
    encode_sample,
    pad_rows,
    render_sample,
    sample_name,
)
from stageline.data.encode import Encoded, check_targets
from stageline.data.limit import Overlong, limit_length
from stageline.data.packing import pack_rows
from stageline.data.rendered import Rendered
from stageline.data.token_cache import token_cache_of


def encode_for_training(
    images: Images,
    sample: Sample,
    *,
    prompt: str,
    prompt_fn: Callable[..., Rendered],
    image_token: Callable[..., Rendered],
    processor: Any,
) -> Encoded:
    """Token ids and labels of one sample, of any length.

    Raises:
        DataError: it has no supervised token.
    """
    name = sample_name(sample)
    cache = token_cache_of(processor)
    texts = {"prompt": prompt, "prompt_fn": prompt_fn, "image_token": image_token}
    kept_as = None if cache is None else cache.name_of(images, sample, **texts)
    kept = None if kept_as is None else cache.get(kept_as)
    if kept is not None:
        return kept
    rendered = render_sample(images, sample, processor=processor, **texts)
    encoded = encode_sample(rendered, images, processor=processor, name=name)
    check_targets(encoded, name=name)
    if kept_as is not None:
        cache.note(kept_as, encoded)
    return encoded


def encode_limited(
    images: Images,
    sample: Sample,
    *,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    overlong: Overlong = "error",
    encode: Callable[..., Encoded] = encode_for_training,
    **texts: Any,
) -> Encoded:
    """Token ids and labels of one sample, of at most `max_token_num` tokens.

    Args:
        encode: makes them of any length.
        texts: prompt, prompt_fn, image_token and processor.
    """
    return limit_length(
        encode(images, sample, **texts),
        max_token_num=max_token_num,
        overlong=overlong,
        name=sample_name(sample),
        pad_token_id=pad_token_id,
        warn=stage == 0,
    )


def length_sft(
    images: Images, sample: Sample, *, pad_to_multiple_of: int = 1, **common: Any
) -> int:
    """Tokens of one sample; `common` is what `collate_sft` takes too."""
    return len(encode_limited(images, sample, **common))


def collate_sft(
    samples: Sequence[tuple[Images, Sample]],
    *,
    prompt: str,
    prompt_fn: Callable[..., Rendered],
    image_token: Callable[..., Rendered],
    processor: Any,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    overlong: Overlong = "error",
    pad_to_multiple_of: int = 1,
) -> dict[str, torch.Tensor]:
    """One micro-batch: ids, mask and labels [B, T], side inputs, and pixels on stage 0."""
    common = {
        "prompt": prompt,
        "prompt_fn": prompt_fn,
        "image_token": image_token,
        "processor": processor,
        "pad_token_id": pad_token_id,
        "max_token_num": max_token_num,
        "stage": stage,
        "overlong": overlong,
    }
    rows = [encode_limited(images, sample, **common) for images, sample in samples]
    return collate_encoded(rows, samples, pad_to_multiple_of=pad_to_multiple_of, **common)


def collate_encoded(
    rows: Sequence[Encoded],
    samples: Sequence[tuple[Images, Sample]],
    *,
    processor: Any,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """As `collate_sft`, of samples that are encoded already."""
    batch = pad_rows(
        rows,
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
    _add_images(batch, rows, samples, processor=processor, stage=stage)
    return batch


def collate_packed_sft(
    rows: Sequence[Sequence[tuple[Images, Sample]]],
    *,
    processor: Any,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch of rows that hold several samples; as `collate_sft` otherwise."""
    shared = {
        "processor": processor,
        "pad_token_id": pad_token_id,
        "max_token_num": max_token_num,
        "stage": stage,
        **common,
    }
    encoded = [[encode_limited(images, sample, **shared) for images, sample in row] for row in rows]
    batch = pack_rows(
        encoded,
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
    # images lie in the order of the samples, as their tokens do
    flat = [item for row in encoded for item in row]
    samples = [item for row in rows for item in row]
    _add_images(batch, flat, samples, processor=processor, stage=stage)
    return batch


def _add_images(
    batch: dict[str, torch.Tensor],
    encoded: Sequence[Encoded],
    samples: Sequence[tuple[Images, Sample]],
    *,
    processor: Any,
    stage: int,
) -> None:
    """Adds image inputs in place; a dropped sample has no image token, so no image either."""
    images = [
        images if any(item.is_target) else ()
        for item, (images, _) in zip(encoded, samples, strict=True)
    ]
    add_image_inputs(
        batch,
        images,
        processor=processor,
        names=[sample_name(sample) for _, sample in samples],
        with_pixels=stage == 0,
    )
