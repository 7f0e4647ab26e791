"""Makes micro-batches of pairs for a reward model; the bodies of the `rm` collate part.

Rows come as chosen, rejected, chosen, rejected ... so that a pair is in one micro-batch whatever
its size. The one token of a row that has a label is where its reward is read: the last one. Rows
end before trailing padding tokens (where EOS is the padding token): the library's classifiers read
there, and what comes behind a token does not change it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from stageline.data.batch import Images, Sample, sample_name
from stageline.data.collate import collate_encoded, encode_limited
from stageline.data.encode import Encoded
from stageline.data.pairs import both_answers
from stageline.errors import DataError


def encode_pair(
    images: Images, sample: Sample, *, pad_token_id: int, **common: Any
) -> tuple[Encoded, Encoded]:
    """Token ids of both rows, the last token of each marked; no mark where one was dropped.

    Args:
        common: as of `encode_limited`.
    """
    pair = [
        encode_limited(images, one, pad_token_id=pad_token_id, **common)
        for one in both_answers(sample)
    ]
    is_whole = all(any(row.is_target) for row in pair)
    chosen, rejected = (_read_at_end(row, pad_token_id, is_whole, sample) for row in pair)
    return chosen, rejected


def length_rewards(
    images: Images, sample: Sample, *, pad_to_multiple_of: int = 1, **common: Any
) -> int:
    """Tokens of the longer row; `common` is what `collate_rewards` takes too."""
    return max(map(len, encode_pair(images, sample, **common)))


def collate_rewards(
    samples: Sequence[tuple[Images, Sample]], *, pad_to_multiple_of: int = 1, **common: Any
) -> dict[str, torch.Tensor]:
    """One micro-batch of two rows a sample, and `loss_margins` [P] of the pairs."""
    pairs = [encode_pair(images, sample, **common) for images, sample in samples]
    batch = collate_encoded(
        [row for pair in pairs for row in pair],
        [item for item in samples for _ in range(2)],
        pad_to_multiple_of=pad_to_multiple_of,
        **common,
    )
    batch["loss_margins"] = torch.tensor([_margin(sample) for _, sample in samples])
    return batch


def _read_at_end(row: Encoded, pad_token_id: int, is_whole: bool, sample: Sample) -> Encoded:
    if not is_whole:
        return replace(row, is_target=[False] * len(row))
    length = len(row)
    while length and row.input_ids[length - 1] == pad_token_id:
        length -= 1
    if length < 2:
        raise DataError(
            f"{sample_name(sample)}: a row of {length} tokens is left of a question and an answer. "
            "Two or more were expected, because a reward is read at the last one: correct the row."
        )
    kept = row.keep(list(range(length)))
    return replace(kept, is_target=[False] * (length - 1) + [True])


def _margin(sample: Sample) -> float:
    margin = sample.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(
            f"{sample_name(sample)}: `margin` is {margin!r:.100}. A number was expected, because "
            "the chosen answer's reward is to be greater by it: correct the row, or leave it out."
        )
    return float(margin)
