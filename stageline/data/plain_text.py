"""Makes micro-batches of plain text, for pre-training; the bodies of the `pt` collate part.

All that is in a row is learnt: the tokens that the tokenizer begins a text with, the text, EOS.
What is padding is known by its place, so a padding token that is EOS too does no harm. Text from
the data never becomes a special token. Cutting long documents into rows is not done here: a
collate part makes as many rows as it gets samples. Samples of a corpus have tokens in place of
text: ready_tokens.py makes their rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from stageline.data.batch import Images, Sample, sample_name
from stageline.data.collate import collate_encoded, encode_limited
from stageline.data.encode import Encoded
from stageline.data.packing import pack_rows
from stageline.data.ready_tokens import (
    collate_packed_ready,
    collate_ready,
    is_ready,
    length_ready,
)
from stageline.errors import DataError


def encode_text(images: Images, sample: Sample, **common: Any) -> Encoded:
    """The tokens of one text, all of them learnt.

    Args:
        common: as of `encode_limited`.

    Raises:
        DataError: it has images, or is too long and may not be cut.
    """
    if images:
        raise DataError(
            f"{sample_name(sample)} has {len(images)} images. Text alone was expected by "
            "--collate-fn pt, because image tokens can't be learnt: use --collate-fn sft."
        )
    encoded = encode_limited(images, sample, **common)
    if not any(encoded.is_target):
        return encoded  # dropped
    return replace(encoded, is_target=[True] * len(encoded))


def length_text(
    images: Images, sample: Sample, *, pad_to_multiple_of: int = 1, **common: Any
) -> int:
    """Tokens of one text; `common` is what `collate_text` takes too."""
    if is_ready(sample):
        return length_ready(sample, **common)
    return len(encode_text(images, sample, **common))


def collate_text(
    samples: Sequence[tuple[Images, Sample]], *, pad_to_multiple_of: int = 1, **common: Any
) -> dict[str, torch.Tensor]:
    """One micro-batch, a text a row: ids, mask and labels [B, T]."""
    if is_ready(samples[0][1]):
        return collate_ready(samples, pad_to_multiple_of=pad_to_multiple_of, **common)
    rows = [encode_text(images, sample, **common) for images, sample in samples]
    return collate_encoded(rows, samples, pad_to_multiple_of=pad_to_multiple_of, **common)


def collate_packed_text(
    rows: Sequence[Sequence[tuple[Images, Sample]]],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch of rows that hold several texts, none of which sees another."""
    common |= {"pad_token_id": pad_token_id, "max_token_num": max_token_num}
    if any(is_ready(sample) for row in rows for _, sample in row):
        return collate_packed_ready(rows, pad_to_multiple_of=pad_to_multiple_of, **common)
    return pack_rows(
        [[encode_text(images, sample, **common) for images, sample in row] for row in rows],
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
