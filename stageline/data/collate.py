"""Makes one micro-batch for supervised fine-tuning; the body of the `sft` collate part.

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
from stageline.data.rendered import Rendered


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
    rendered = render_sample(
        images,
        sample,
        prompt=prompt,
        prompt_fn=prompt_fn,
        image_token=image_token,
        processor=processor,
    )
    encoded = encode_sample(rendered, images, processor=processor, name=name)
    check_targets(encoded, name=name)
    return encoded


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
) -> dict[str, torch.Tensor]:
    """One micro-batch: ids, mask and labels [B, T], side inputs, and pixels on stage 0."""
    rows: list[Encoded] = []
    images_of_rows: list[Images] = []
    for images, sample in samples:
        encoded = encode_for_training(
            images,
            sample,
            prompt=prompt,
            prompt_fn=prompt_fn,
            image_token=image_token,
            processor=processor,
        )
        limited = limit_length(
            encoded,
            max_token_num=max_token_num,
            overlong=overlong,
            name=sample_name(sample),
            pad_token_id=pad_token_id,
            warn=stage == 0,
        )
        is_dropped = not any(limited.is_target)
        rows.append(limited)
        images_of_rows.append(() if is_dropped else images)
    batch = pad_rows(rows, pad_token_id=pad_token_id)
    add_image_inputs(
        batch,
        images_of_rows,
        processor=processor,
        names=[sample_name(sample) for _, sample in samples],
        with_pixels=stage == 0,
    )
    return batch
