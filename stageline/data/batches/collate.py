"""Encodes samples and makes one micro-batch of them.

Token ids are the same on every rank; only the first stage decodes pixels. Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stageline.data.batches.batch import (
    Images,
    MicroBatch,
    Sample,
    add_image_inputs,
    encode_sample,
    pack_rows,
    pad_rows,
    render_sample,
    sample_name,
)
from stageline.data.batches.collate_part import EncodedSample, all_encoded
from stageline.data.text.encode import Encoded, check_targets
from stageline.data.text.limit import Overlong, limit_length
from stageline.data.text.template import MarkedWords

Item = EncodedSample | tuple[Images, Sample]
TEXTS = ("prompt", "prompt_fn", "image_token", "processor")


def encode_for_training(
    images: Images,
    sample: Sample,
    *,
    processor: Any,
    words: MarkedWords | None = None,
    **texts: Any,
) -> Encoded:
    """Return token ids and labels of one sample, of any length."""
    name = sample_name(sample)
    rendered = render_sample(images, sample, processor=processor, **texts)
    if words is not None:
        rendered = words.mark(rendered)
    encoded = encode_sample(rendered, images, processor=processor, name=name)
    check_targets(encoded, name=name)
    return encoded


def encode_sft(
    images: Images,
    sample: Sample,
    *,
    pad_token_id: int,
    max_token_num: int,
    stage: int,
    overlong: Overlong = "error",
    encode: Callable[..., Encoded] = encode_for_training,
    **texts: Any,
) -> EncodedSample:
    """Encode one sample that becomes one row, of at most `max_token_num` tokens.

    Args:
        encode: makes token ids and labels of any length.
        texts: prompt, prompt_fn, image_token and processor; others are ignored.
    """
    whole = encode(images, sample, **{name: texts[name] for name in TEXTS})
    row = limit_length(
        whole,
        max_token_num=max_token_num,
        overlong=overlong,
        name=sample_name(sample),
        pad_token_id=pad_token_id,
        warn=stage == 0,
    )
    return EncodedSample(images, sample, [row], len(row), [whole])


def collate_sft(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch: ids, mask and labels [B, T], side inputs, and pixels on stage 0."""
    return collate_encoded(all_encoded(samples, encode_sft, **common), **common)


def collate_packed_sft(rows: Sequence[Sequence[Item]], **common: Any) -> MicroBatch:
    """Make one micro-batch of rows that hold several samples; as `collate_sft` otherwise."""
    encoded = [all_encoded(row, encode_sft, **common) for row in rows]
    batch = pack_encoded(encoded, **common)
    # images have the order of the samples, as their tokens do
    _add_images(batch, [sample for row in encoded for sample in row], **common)
    return batch


def collate_encoded(samples: Sequence[EncodedSample], **common: Any) -> MicroBatch:
    """Make one micro-batch as `collate_sft` does, of encoded samples with one or more rows each."""
    batch = pad_rows([row for sample in samples for row in sample.rows], **row_options(**common))
    _add_images(batch, samples, **common)
    return batch


def pack_encoded(rows: Sequence[Sequence[EncodedSample]], **common: Any) -> MicroBatch:
    """Return the tokens of rows that hold several encoded samples each."""
    packed = [[one for sample in row for one in sample.rows] for row in rows]
    return pack_rows(packed, **row_options(**common))


def row_options(
    *, pad_token_id: int, max_token_num: int, pad_to_multiple_of: int = 1, **common: Any
) -> dict[str, Any]:
    """Return the arguments of `pad_rows` and `pack_rows`."""
    return {
        "pad_token_id": pad_token_id,
        "multiple_of": pad_to_multiple_of,
        "max_width": max_token_num,
    }


def _add_images(
    batch: MicroBatch,
    samples: Sequence[EncodedSample],
    *,
    processor: Any,
    stage: int,
    **common: Any,
) -> None:
    """Add image inputs in place; a dropped sample has no image token, so no image either."""
    rows = [(row, sample) for sample in samples for row in sample.rows]
    add_image_inputs(
        batch,
        [sample.images if any(row.is_target) else () for row, sample in rows],
        processor=processor,
        names=[sample_name(sample.sample) for _, sample in rows],
        with_pixels=stage == 0,
    )
