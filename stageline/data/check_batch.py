"""Looks at the ids of each micro-batch on the host, before the model does.

On a GPU an id without a row in the embedding kills the process with a message that names nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stageline.data.batch import IGNORE, sample_name
from stageline.data.lengths import companion
from stageline.errors import DataError


class CheckedCollate:
    """A collate function, and a look at what it made; its companions are those of the part.

    Args:
        collate: samples -> micro-batch.
        vocab_size: rows of the model's embedding.
    """

    def __init__(self, collate: Callable[..., dict[str, torch.Tensor]], vocab_size: int) -> None:
        self._collate = collate
        self._vocab_size = vocab_size
        self.length_of = companion(collate, "length_of")
        packed = companion(collate, "packed")
        self.packed = None if packed is None else functools.partial(self._packed, packed)

    def __call__(self, samples: Sequence[Any], **options: Any) -> dict[str, torch.Tensor]:
        """The micro-batch of the samples.

        Raises:
            DataError: names the sample, place and id of the first id out of range.
        """
        batch = self._collate(samples, **options)
        check_ids(batch, self._vocab_size, samples=[[sample] for sample in samples])
        return batch

    def _packed(
        self, packed: Callable[..., dict[str, torch.Tensor]], rows: Sequence[Any], **options: Any
    ) -> dict[str, torch.Tensor]:
        batch = packed(rows, **options)
        check_ids(batch, self._vocab_size, samples=rows)
        return batch


def check_ids(
    batch: dict[str, torch.Tensor], vocab_size: int, *, samples: Sequence[Sequence[Any]]
) -> None:
    """Refuses token ids and labels for which the model has no row.

    Args:
        samples: (images, sample) of each row.

    Raises:
        DataError: names sample, place, id and vocabulary.
    """
    ids_BT = batch.get("input_ids")
    labels_BT = batch.get("labels")
    if ids_BT is None:
        return
    is_bad_BT = _out_of_range(ids_BT, vocab_size)
    if is_bad_BT is not None:
        raise _bad_id("token id", ids_BT, is_bad_BT, vocab_size, batch, samples)
    if labels_BT is None or labels_BT.shape != ids_BT.shape or labels_BT.is_floating_point():
        return
    is_bad_BT = _out_of_range(labels_BT, vocab_size, ignore=IGNORE)
    if is_bad_BT is not None:
        raise _bad_id("label", labels_BT, is_bad_BT, vocab_size, batch, samples)


def check_encoded(ids: Sequence[int], vocab_size: int, *, name: str) -> None:
    """As `check_ids`, for the ids of one sample.

    Raises:
        DataError: names sample, place, id and vocabulary.
    """
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise DataError(_message("token id", token_id, place, vocab_size, name))


def _out_of_range(
    values: torch.Tensor, vocab_size: int, *, ignore: int | None = None
) -> torch.Tensor | None:
    """Where values are out of range; None where they nowhere are."""
    is_bad = (values >= vocab_size) | (values < 0)
    if ignore is not None:
        is_bad &= values != ignore
    return is_bad if bool(is_bad.any()) else None


def _bad_id(
    kind: str,
    values: torch.Tensor,
    is_bad: torch.Tensor,
    vocab_size: int,
    batch: dict[str, torch.Tensor],
    samples: Sequence[Sequence[Any]],
) -> DataError:
    number, *rest = is_bad.nonzero()[0].tolist()
    row = number * len(samples) // len(values)  # a sample may be several rows
    names = [sample_name(sample) for _, sample in samples[row]] if row < len(samples) else []
    if "sample_ids" in batch and len(names) > 1:  # a packed row: which of its samples
        place = int(batch["sample_ids"][row, rest[0]])
        names = names[place : place + 1] or names
    value = int(values[(number, *rest)])
    return DataError(
        _message(kind, value, rest[0] if rest else 0, vocab_size, " and ".join(names) or "?")
    )


def _message(kind: str, value: int, place: int, vocab_size: int, name: str) -> str:
    allowed = f"0 to {vocab_size - 1}" + (f", or {IGNORE} for none," if kind == "label" else "")
    return (
        f"{name}: the {kind} at place {place} is {value}. {allowed} was expected, because the "
        f"model's embedding has {vocab_size} rows, and looking up another one fails: use the "
        "tokenizer that belongs to the model (--processor-path), or correct the part that makes "
        "the ids."
    )
