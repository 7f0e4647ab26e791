"""Prompts that a model is to answer, and the rows that they become with answers of its own.

Before there are answers a prompt is a row with a stand-in for the longest one, so that lengths that
are checked and measured hold for every step. Shapes: B rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stageline.data.batches.batch import (
    Images,
    MicroBatch,
    Sample,
    add_image_inputs,
    encode_sample,
    pad_rows,
    render_sample,
    sample_name,
)
from stageline.data.batches.collate import Item, collate_encoded, collate_packed_sft, encode_sft
from stageline.data.batches.collate_part import EncodedSample, all_encoded
from stageline.data.text.encode import Encoded


def encode_prompt(
    images: Images, sample: Sample, *, max_completion_length: int, **common: Any
) -> EncodedSample:
    """Encode a prompt, up to where its answer begins, with a stand-in for the longest answer."""

    def with_stand_in(images: Images, sample: Sample, *, processor: Any, **texts: Any) -> Encoded:
        rendered = render_sample(images, sample, processor=processor, for_generation=True, **texts)
        prompt = encode_sample(rendered, images, processor=processor, name=sample_name(sample))
        return with_answer(prompt, [common["pad_token_id"]] * max_completion_length)

    return encode_sft(images, sample, encode=with_stand_in, **common)


def encode_question(
    images: Images, sample: Sample, *, processor: Any, pad_token_id: int, **texts: Any
) -> EncodedSample:
    """Encode a prompt of any length, as an evaluation asks it, with a stand-in of one token."""
    rendered = render_sample(images, sample, processor=processor, for_generation=True, **texts)
    prompt = encode_sample(rendered, images, processor=processor, name=sample_name(sample))
    row = with_answer(prompt, [pad_token_id])
    return EncodedSample(images, sample, [row], len(row), [row])


def with_answer(
    prompt: Encoded, answer: Sequence[int], is_own: Sequence[bool] | None = None
) -> Encoded:
    """Return the row of a prompt and its answer, which is in the loss; of several turns its own."""
    is_target = [False] * len(prompt) + list(is_own or [True] * len(answer))
    ids = [*prompt.input_ids, *answer]
    return Encoded(ids, is_target=is_target, is_cuttable=[False] * len(ids))


def prompt_of(encoded: EncodedSample) -> Encoded:
    """Return what is before the last supervised part, which is the answer."""
    [row] = encoded.whole
    length = len(row) - row.is_target[::-1].index(True)
    while length and row.is_target[length - 1]:
        length -= 1
    return Encoded(row.input_ids[:length], [False] * length, [False] * length)


def answered(
    encoded: EncodedSample, answer: Sequence[int], is_own: Sequence[bool] | None = None
) -> EncodedSample:
    """Return the sample with an answer in the place of the stand-in."""
    row = with_answer(prompt_of(encoded), answer, is_own)
    return replace(encoded, rows=[row], length=len(row), whole=[row])


def decoder_inputs(encoded: EncodedSample, *, processor: Any, pad_token_id: int) -> MicroBatch:
    """Return a decoder's inputs of a prompt: ids and mask [1, T], pixels and side inputs."""
    batch = pad_rows(
        [prompt_of(encoded)], pad_token_id=pad_token_id, side="left", with_labels=False
    )
    images, names = [encoded.images or ()], [sample_name(encoded.sample)]
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=True)
    return batch


def collate_answers(samples: Sequence[Item], **common: Any) -> MicroBatch:
    """Make one micro-batch of prompts with answers, or with their stand-ins."""
    return collate_encoded(all_encoded(samples, encode_prompt, **common), **common)


def collate_packed_answers(rows: Sequence[Sequence[Item]], **common: Any) -> MicroBatch:
    """Make one micro-batch of rows that hold several; as `collate_answers` otherwise."""
    return collate_packed_sft([all_encoded(row, encode_prompt, **common) for row in rows], **common)
