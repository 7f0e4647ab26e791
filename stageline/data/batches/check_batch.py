"""Looks at each micro-batch on the host, before the model does: what a collate part gave, and ids.

On a GPU an id without a row in the embedding kills the process with a message that names nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stageline.contracts import broken, call, shown
from stageline.data.batches.batch import IGNORE, MicroBatch, sample_name
from stageline.data.batches.collate_part import CollatePart, EncodedSample, as_collate_part
from stageline.errors import DataError

_NAMES = ("input_ids", "attention_mask", "labels")


class CheckedCollate(CollatePart):
    """A collate part, and a look at what it made.

    Args:
        collate: the part, or a function: samples -> micro-batch.
        vocab_size: rows of the model's embedding; None: nobody knows.
    """

    def __init__(self, collate: Callable[..., Any], vocab_size: int | None) -> None:
        part = as_collate_part(collate)
        super().__init__(part.collate, encode=part.encode, pack=part.pack)
        self._vocab_size = vocab_size
        self.collate = functools.partial(self._checked, part.collate)
        if part.pack is not None:
            self.pack = functools.partial(self._checked, part.pack, is_packed=True)

    def _checked(
        self,
        make: Callable[..., MicroBatch],
        rows: Sequence[Any],
        *,
        is_packed: bool = False,
        **options: Any,
    ) -> MicroBatch:
        """The micro-batch of samples, or of rows of them.

        Raises:
            ContractError: the part takes other arguments, or gave something else.
            DataError: names the sample, place and id of the first id out of range.
        """
        batch = call("collate_fn", make, rows, **options)
        check_micro_batch(batch, num_samples=len(rows), part=make)
        samples = rows if is_packed else [[sample] for sample in rows]
        if self._vocab_size is not None:
            _check_ids(batch, self._vocab_size, samples=samples)
        return batch


def check_micro_batch(batch: object, *, num_samples: int, part: object) -> None:
    """Refuses what is no micro-batch; looks at types and shapes alone.

    Args:
        num_samples: that it was made of.
        part: the collate part.

    Raises:
        ContractError: part, file and line, and what came are named.
    """
    problem = _problem_of(batch, num_samples)
    if problem is not None:
        came, cure = problem
        raise broken(
            "collate_fn",
            part,
            came,
            why="A dict of tensors was expected, with input_ids, attention_mask and labels of one "
            "shape, rows x tokens, in integers, because stages and loss take them by name",
            cure=cure,
        )


def check_encode(collate: Callable[..., Any], sample: tuple[Any, Any]) -> Any:
    """Tries the `encode` of a collate part, if it has one; gives what it made, or the sample.

    Raises:
        ContractError: it takes other arguments, or gives something else than an encoded sample.
    """
    encode = as_collate_part(collate).encode
    if encode is None:
        return sample
    encoded = call("encode", encode, *sample)
    length = getattr(encoded, "length", None)
    if not isinstance(encoded, EncodedSample):
        came = f"returned {shown(encoded)}"
    elif not isinstance(length, int) or isinstance(length, bool) or length < 1:
        came = f"returned an EncodedSample with the length {shown(length)}"
    else:
        return encoded
    raise broken(
        "encode",
        encode,
        came,
        why="An EncodedSample was expected, with its number of tokens as length, because rows of "
        "near-equal length go together, and each is encoded once",
        cure="return what encode_sft of stageline.data.batches.collate gives, or "
        "EncodedSample(images, sample, rows, length, whole)",
    )


def _problem_of(batch: object, num_samples: int) -> tuple[str, str] | None:
    """What is wrong with a micro-batch, and the cure."""
    if not isinstance(batch, dict):
        return f"returned {shown(batch)}", "return a dict, as collate_sft of stageline.data does"
    missing = [name for name in _NAMES if name not in batch]
    if missing:
        came = f"returned {shown(batch)}, without {' and '.join(missing)}"
        return came, "add them; labels are the token ids, -100 where nothing is learnt"
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            return f"returned {name!r} as {shown(value)}", "make a tensor of it, torch.tensor(...)"
    ids = batch["input_ids"]
    for name in _NAMES:
        value = batch[name]
        is_whole = not value.is_floating_point() and not value.is_complex()
        if value.ndim != 2 or not is_whole or value.shape != ids.shape:
            cure = f"give it the shape of input_ids ({shown(ids)}), and torch.long"
            if name == "input_ids":
                cure = "give it two dimensions, a row for each sample, and torch.long"
            return f"returned {name!r} as {shown(value)}", cure
    if len(ids) == 0 or ids.shape[1] == 0 or len(ids) % num_samples:
        came = f"made {len(ids)} rows of {ids.shape[1]} tokens out of {num_samples} samples"
        return came, "make one row of each sample, or the same number of each, in their order"
    return None


def _check_ids(batch: MicroBatch, vocab_size: int, *, samples: Sequence[Sequence[Any]]) -> None:
    """Refuses token ids and labels for which the model has no row.

    Args:
        samples: (images, sample) of each row.

    Raises:
        DataError: names sample, place, id and vocabulary.
    """
    for name, kind in (("input_ids", "token id"), ("labels", "label")):
        values_BT = batch[name]
        is_bad_BT = (values_BT >= vocab_size) | (values_BT < 0)
        if name == "labels":
            is_bad_BT &= values_BT != IGNORE
        if not is_bad_BT.any():
            continue
        number, place = is_bad_BT.nonzero()[0].tolist()
        row = number * len(samples) // len(values_BT)  # a sample may be several rows
        names = [sample_name(sample) for _, sample in samples[row]]
        if "sample_ids" in batch and len(names) > 1:  # a packed row: which of its samples
            own = int(batch["sample_ids"][row, place])
            names = names[own : own + 1] or names
        allowed = f"0 to {vocab_size - 1}" + (
            f", or {IGNORE} for none," if name == "labels" else ""
        )
        raise DataError(
            f"{' and '.join(names) or '?'}: the {kind} at place {place} is "
            f"{int(values_BT[number, place])}. {allowed} was expected, because the model's "
            f"embedding has {vocab_size} rows, and looking up another one fails: use the tokenizer "
            "that belongs to the model (`processor_path`), or correct the part that makes the ids."
        )
