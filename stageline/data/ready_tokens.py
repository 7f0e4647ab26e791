"""Micro-batches of samples whose tokens are ready: segments of a pre-training corpus.

Such a sample has `segments`, arrays of token ids, in place of a text. All of a segment is learnt
but its first token, which no token of the same segment goes before. Samples that say `is_packed`
hold several segments a row, none of which sees another.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from stageline.data.batch import Images, Sample, pad_rows, sample_name
from stageline.data.encode import Encoded
from stageline.data.limit import TextOverlong, limit_length
from stageline.data.packing import pack_rows
from stageline.errors import DataError

Items = Sequence[tuple[Images, Sample]]


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
        f"--max-token-num {max_token_num}. A row has to fit as a whole, because it was packed "
        f"so: raise --max-token-num to {total}, or pack the corpus into shorter rows."
    )


def _encoded(ids: numpy.ndarray) -> Encoded:
    """In arrays, not lists: a corpus is read as fast as its tokens can be copied."""
    count = len(ids)
    return Encoded(ids, numpy.ones(count, bool), numpy.zeros(count, bool))  # type: ignore


def length_ready(sample: Sample, *, max_token_num: int, **common: Any) -> int:
    """Tokens of one row; `common` is what the collate part takes too."""
    total = sum(map(len, sample["segments"]))
    if total <= max_token_num:
        return total
    return sum(map(len, encode_ready(sample, max_token_num=max_token_num, **common)))


def collate_ready(
    samples: Items,
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch: a sample a row, of one segment or, where it was packed so, of several."""
    common |= {"pad_token_id": pad_token_id, "max_token_num": max_token_num}
    rows = [encode_ready(sample, **common) for _, sample in samples]
    shape = {"multiple_of": pad_to_multiple_of, "max_width": max_token_num}
    if any(sample.get("is_packed") for _, sample in samples):
        return pack_rows(rows, pad_token_id=pad_token_id, **shape)
    return pad_rows([row for (row,) in rows], pad_token_id=pad_token_id, **shape)


def collate_packed_ready(
    rows: Sequence[Items],
    *,
    pad_token_id: int,
    max_token_num: int,
    pad_to_multiple_of: int = 1,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """One micro-batch of rows that are filled with the segments of several samples."""
    common |= {"pad_token_id": pad_token_id, "max_token_num": max_token_num}
    return pack_rows(
        [[one for _, sample in row for one in encode_ready(sample, **common)] for row in rows],
        pad_token_id=pad_token_id,
        multiple_of=pad_to_multiple_of,
        max_width=max_token_num,
    )
