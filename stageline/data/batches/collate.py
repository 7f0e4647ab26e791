"""Encodes samples and makes one micro-batch of them: the bodies of `sft` and `contrastive`.

Token ids are the same on every rank; only the first stage decodes pixels. Shapes: B rows, T tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
from stageline.data.batches.collate_part import ROLES, EncodedSample, all_encoded
from stageline.data.text.encode import Encoded, check_targets
from stageline.data.text.limit import Overlong, limit_length
from stageline.data.text.template import MarkedWords
from stageline.errors import DataError

Item = EncodedSample | tuple[Images, Sample]
_LEAST = 3  # samples of a group
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
    # images lie in the order of the samples, as their tokens do
    _add_images(batch, [sample for row in encoded for sample in row], **common)
    return batch


def collate_encoded(
    samples: Sequence[EncodedSample],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> MicroBatch:
    """As `collate_sft`, of samples that are encoded and may have several rows each."""
    batch = pad_rows(
        [row for sample in samples for row in sample.rows],
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
    _add_images(batch, samples, **common)
    return batch


def pack_encoded(
    rows: Sequence[Sequence[EncodedSample]],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> MicroBatch:
    """Lay out the tokens of rows that hold several encoded samples each."""
    return pack_rows(
        [[one for sample in row for one in sample.rows] for row in rows],
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )


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


def encode_marked(
    images: Images, sample: Sample, *, words: MarkedWords, **common: Any
) -> EncodedSample:
    """As `encode_sft`, with the tokens of some words marked."""
    encode = functools.partial(encode_for_training, words=words)
    return encode_sft(images, sample, encode=encode, **common)


def collate_contrastive(
    samples: Sequence[Item], *, words: MarkedWords, **common: Any
) -> MicroBatch:
    """As `collate_sft`, of whole groups, with `loss_marks` and `loss_groups`.

    A group is an anchor, its positive and one or more negatives, in this order: neighbouring
    samples with the same `contrast_group`, each with its `role`.

    `loss_marks` [B, T] bool: supervised tokens that cover a character of one of the words.
    `loss_groups` [B] int64: number of the group within the micro-batch.
    """
    groups = group_numbers([sample for _, sample in samples])
    encoded = all_encoded(samples, encode_marked, words=words, **common)
    batch = collate_encoded(encoded, **common)
    marks_BT = torch.zeros_like(batch["labels"], dtype=torch.bool)
    for index, one in enumerate(encoded):
        marked = torch.tensor(one.rows[0].is_marked, dtype=torch.bool)  # empty: it was dropped
        marks_BT[index, : len(marked)] = marked
    batch["loss_marks"] = marks_BT
    batch["loss_groups"] = torch.tensor(groups, dtype=torch.int64)
    return batch


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """Return the number of each sample's group, from 0 on."""

    def not_whole(sample: Sample, wanted: str) -> DataError:
        return DataError(
            f"{sample_name(sample)}: group not whole: it has contrast_group "
            f"{sample.get('contrast_group')!r} and role {sample.get('role')!r} in place of "
            f"{wanted}. Use a dataset with group_size (`dataset` groups), and correct its rows."
        )

    # a group may come twice: one fills up the last steps of an evaluation
    starts = [index for index, sample in enumerate(samples) if sample.get("role") == "anchor"]
    if starts[:1] != [0]:
        raise not_whole(samples[0], "the anchor (sample 1) of a new group")
    size = [*starts, len(samples)][1]
    if size < _LEAST:
        raise not_whole(samples[size - 1], "an anchor, a positive and at least one negative")
    for index, sample in enumerate(samples):
        place = index % size
        anchor = samples[index - place]
        group, role = sample.get("contrast_group"), sample.get("role")
        expected = ROLES[min(place, 2)]
        if role != expected or group is None or group != anchor.get("contrast_group"):
            wanted = f"{anchor.get('contrast_group')!r}" if place else "a new group"
            raise not_whole(sample, f"the {expected} (sample {place + 1} of {size}) of {wanted}")
    if len(samples) % size:
        missing = size - len(samples) % size
        raise not_whole(samples[-1], f"{missing} more behind it, since groups have {size} samples")
    return [index // size for index in range(len(samples))]
