"""Makes one micro-batch of whole groups; the body of the `contrastive` collate part.

A group is an anchor, its positive and one or more negatives: neighbouring samples with the same
`contrast_group`, each with its `role`. Shapes: B samples, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from stageline.data.batch import Images, Sample, sample_name
from stageline.data.collate import collate_encoded, encode_limited
from stageline.data.encode import Encoded
from stageline.data.marked_words import MarkedWords
from stageline.errors import DataError

ROLES = ("anchor", "positive", "negative")
_LEAST = 3  # samples of a group


def collate_contrastive(
    samples: Sequence[tuple[Images, Sample]],
    *,
    words: MarkedWords,
    image_token: Any,
    **common: Any,
) -> dict[str, torch.Tensor]:
    """As `collate_sft`, with `loss_marks` and `loss_groups`.

    `loss_marks` [B, T] bool: supervised tokens that cover a character of one of the words.
    `loss_groups` [B] int64: number of the group within the micro-batch; its rows are the anchor,
    the positive and the negatives, in this order.

    Raises:
        DataError: a group is not whole.
    """
    groups = group_numbers([sample for _, sample in samples])
    common["image_token"] = words.marking(image_token)
    limited = {name: value for name, value in common.items() if name != "pad_to_multiple_of"}
    rows = [encode_limited(images, sample, **limited) for images, sample in samples]
    batch = collate_encoded(rows, samples, **common)
    batch["loss_marks"] = _marks(rows, batch["labels"].shape)
    batch["loss_groups"] = torch.tensor(groups, dtype=torch.int64)
    return batch


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """The number of each sample's group, from 0 on.

    Raises:
        DataError: a group is not whole: names the sample, and what was expected in its place.
    """
    # a group may come twice: one fills up the last steps of an evaluation
    starts = [index for index, sample in enumerate(samples) if sample.get("role") == "anchor"]
    size = _size(samples, starts)
    for index, sample in enumerate(samples):
        place = index % size
        anchor = samples[index - place]
        group, role = sample.get("contrast_group"), sample.get("role")
        expected = ROLES[min(place, 2)]
        if role != expected or group is None or group != anchor.get("contrast_group"):
            wanted = f"{anchor.get('contrast_group')!r}" if place else "a new group"
            raise _not_whole(sample, f"the {expected} (sample {place + 1} of {size}) of {wanted}")
    if len(samples) % size:
        raise _not_whole(
            samples[-1],
            f"{size - len(samples) % size} more behind it, since groups have {size} samples",
        )
    return [index // size for index in range(len(samples))]


def _size(samples: Sequence[Sample], starts: Sequence[int]) -> int:
    """Samples of a group, as the first one has them."""
    if not starts or starts[0] != 0:
        raise _not_whole(samples[0], "the anchor (sample 1) of a new group")
    size = starts[1] if len(starts) > 1 else len(samples)
    if size < _LEAST:
        raise _not_whole(samples[size - 1], "an anchor, a positive and at least one negative")
    return size


def _not_whole(sample: Sample, expected: str) -> DataError:
    return DataError(
        f"{sample_name(sample)}: group not whole: it has contrast_group "
        f"{sample.get('contrast_group')!r} and role {sample.get('role')!r}, expected was "
        f"{expected}. The samples of a group are compared with each other, so they have to come "
        "one behind the other: anchor, positive, negatives. Use a dataset with group_size "
        "(--dataset groups), and correct its rows."
    )


def _marks(rows: Sequence[Encoded], shape: Sequence[int]) -> torch.Tensor:
    marks_BT = torch.zeros(tuple(shape), dtype=torch.bool)
    for index, row in enumerate(rows):
        marked = torch.tensor(row.is_marked, dtype=torch.bool)  # empty for a dropped sample
        marks_BT[index, : len(marked)] = marked
    return marks_BT
