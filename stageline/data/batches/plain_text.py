"""Makes micro-batches of plain text, for pre-training; the bodies of the `pt` collate part.

All that is in a row is learnt: the tokens that the tokenizer begins a text with, the text, EOS.
What is padding is known by its place, so a padding token that is EOS too does no harm. Text from
the data never becomes a special token. Cutting long documents into rows is not done here: a
collate part makes as many rows as it gets samples. Samples of a corpus have tokens in place of
text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch

from stageline.data.batches.batch import Images, Sample, pack_rows, pad_rows, sample_name
from stageline.data.batches.collate import Item, collate_encoded, encode_sft
from stageline.data.batches.collate_part import EncodedSample, all_encoded
from stageline.data.text.encode import Encoded
from stageline.data.text.limit import TextOverlong, limit_length
from stageline.errors import DataError

# -- micro-batches of samples whose tokens are ready: segments of a pre-training corpus -----------
# Such a sample has `segments`, arrays of token ids, in place of a text. All of a segment is learnt
# but its first token, which no token of the same segment goes before. Samples that say `is_packed`
# hold several segments a row, none of which sees another.


def is_ready(sample: Sample) -> bool:
    """Whether a sample has tokens in place of a text."""
    return "segments" in sample


def encode_ready(
    sample: Sample,
    *,
    max_token_num: int,
    pad_token_id: int = 0,
    overlong: TextOverlong = "error",
    stage: int = 0,
    **common: Any,
) -> list[Encoded]:
    """The segments of one sample, each learnt as a whole.

    Raises:
        DataError: the row is too long and may not be cut; or it holds several segments, of which
            none can be cut or dropped alone.
    """
    segments = sample["segments"]
    total = sum(map(len, segments))
    if total <= max_token_num:
        return [_encoded(ids) for ids in segments]
    if len(segments) == 1:
        count = len(segments[0])
        limited = limit_length(
            Encoded(segments[0].tolist(), [True] * count, [False] * count),
            max_token_num=max_token_num,
            overlong=overlong,
            name=sample_name(sample),
            pad_token_id=pad_token_id,
            warn=stage == 0,
        )
        return [limited]
    raise DataError(
        f"{sample_name(sample)}: {len(segments)} segments of {total} tokens do not fit "
        f"`max_token_num` {max_token_num}. A row has to fit as a whole, because it was packed "
        f"so: raise `max_token_num` to {total}, or pack the corpus into shorter rows."
    )


def _encoded(ids: numpy.ndarray) -> Encoded:
    """In arrays, not lists: a corpus is read as fast as its tokens can be copied."""
    count = len(ids)
    return Encoded(ids, numpy.ones(count, bool), numpy.zeros(count, bool))  # type: ignore


# -------------------------------------------------------------------------------------------------


def encode_text(images: Images, sample: Sample, **common: Any) -> EncodedSample:
    """The tokens of one text, all of them learnt; or of the segments of a sample of a corpus.

    Args:
        common: as of `encode_sft`.

    Raises:
        DataError: it has images, or is too long and may not be cut.
    """
    if is_ready(sample):
        segments = encode_ready(sample, **common)
        return EncodedSample(images, sample, segments, sum(map(len, segments)), segments)
    if images:
        raise DataError(
            f"{sample_name(sample)} has {len(images)} images. Text alone was expected by "
            "`collate_fn` pt, because image tokens can't be learnt: use `collate_fn` sft."
        )
    encoded = encode_sft(images, sample, **common)
    (row,) = encoded.rows
    if not any(row.is_target):
        return encoded  # dropped
    return replace(encoded, rows=[replace(row, is_target=[True] * len(row))])


def collate_text(
    samples: Sequence[Item],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch, a text a row: ids, mask and labels [B, T].

    A sample of a corpus is a row, too, of one segment or, where it was packed so, of several.
    """
    common |= {"pad_token_id": pad_token_id, "max_token_num": max_token_num}
    encoded = all_encoded(samples, encode_text, **common)
    if not is_ready(encoded[0].sample):
        return collate_encoded(encoded, pad_to_multiple_of=pad_to_multiple_of, **common)
    shape = {"multiple_of": pad_to_multiple_of, "max_width": max_token_num}
    rows = [one.rows for one in encoded]
    if any(one.sample.get("is_packed") for one in encoded):
        return pack_rows(rows, pad_token_id=pad_token_id, **shape)
    return pad_rows([row for (row,) in rows], pad_token_id=pad_token_id, **shape)


def collate_packed_text(
    rows: Sequence[Sequence[Item]],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch of rows that hold several texts or segments, none of which sees another."""
    common |= {"pad_token_id": pad_token_id, "max_token_num": max_token_num}
    encoded = [all_encoded(row, encode_text, **common) for row in rows]
    return pack_rows(
        [[one for sample in row for one in sample.rows] for row in encoded],
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
