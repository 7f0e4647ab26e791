"""Looks at the data before the model does: at its rows in the beginning, at each micro-batch later.

The first bad row ends the run before any model is loaded: rows are rendered and tokenized, and
their images decoded, on the CPU. Where rows may be left out (bad or overlong ones), all are looked
at: the rest has to be the same on every rank.
"""

import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Subset

from stageline.contracts import IGNORE, broken, call, shown
from stageline.data.batches.batch import Images, MicroBatch, Sample, sample_name
from stageline.data.batches.collate import encode_sft
from stageline.data.batches.collate_part import CollatePart, EncodedSample, as_collate_part
from stageline.data.batches.sampler import is_stream
from stageline.data.batches.step_maker import read_row
from stageline.data.images.image_files import ImageSettings
from stageline.data.images.images import ImageExpander, check_image
from stageline.data.rows.bad_rows import BadRows
from stageline.data.text.limit import DROPPING, Overlong
from stageline.data.text.processor import get_tokenizer
from stageline.errors import DataError, UserError

MOST_CHECKED = 2000  # rows, where all may stay
_HANDLING = {
    "cut_prompt": "their prompts are cut",
    "cut": "their ends are cut",
    "share": "prompts and answers are cut",
    "drop": "dropped",
    "error": "refused",
}
_TENSORS = ("input_ids", "attention_mask", "labels")


@dataclass
class PreflightReport:
    """Counts of the rows that were checked so far."""

    num_rows: int | None  # rows of the dataset; None for a stream
    overlong: Overlong  # handling of rows above the limit
    num_checked: int = 0  # fewer than all where the limit of rows or seconds was reached
    num_overlong: int = 0
    shortest: int = sys.maxsize  # tokens of a row before it is cut
    longest: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_sequences: int = 0  # rows, where a pair of answers is two
    bad: list[int] = field(default_factory=list)  # rows to leave out because they are bad
    dropped: list[int] = field(default_factory=list)  # overlong, and nothing is left to learn

    def add(self, row: int, encoded: EncodedSample, max_token_num: int) -> None:
        """Count a row."""
        lengths = list(map(len, encoded.whole))
        self.num_checked += 1
        self.num_overlong += max(lengths) > max_token_num
        self.shortest = min(self.shortest, max(lengths))
        self.longest = max(self.longest, *lengths)
        self.num_sequences += len(lengths)
        self.num_tokens += sum(lengths)
        self.num_targets += sum(whole.num_targets for whole in encoded.whole)
        if not all(any(one.is_target) for one in encoded.rows):
            self.dropped.append(row)

    def __str__(self) -> str:
        mean = self.num_tokens / max(self.num_sequences, 1)
        share = 100 * self.num_targets / max(self.num_tokens, 1)
        of = "the first rows of a stream" if self.num_rows is None else f"{self.num_rows} rows"
        text = (
            f"{self.num_checked} of {of} checked: {mean:.0f} tokens on average, "
            f"{self.longest} at most, {share:.0f} % in the loss"
        )
        if self.num_overlong:
            text += f", {self.num_overlong} too long ({_HANDLING[self.overlong]}"
            is_shared = self.overlong == "share"
            text += f"; {len(self.dropped)} dropped: nothing to learn left)" if is_shared else ")"
        return text + (f", {len(self.bad)} left out" if self.bad else "")


def check_vocabulary(processor: Any, vocab_size: int) -> None:
    """Refuse a tokenizer with ids above the `vocab_size` rows of the embedding."""
    vocabulary = get_tokenizer(processor).get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer has ids up to {largest} ({token!r}), and the model's embedding has "
            f"{vocab_size} rows. Use the tokenizer of the model (`processor_path`), or "
            f"`vocab.resize`, which adds rows (as resize_token_embeddings({largest + 1}) does)."
        )


def preflight(
    dataset: Any,
    *,
    processor: Any,
    max_token_num: int,
    overlong: Overlong = "error",
    vocab_size: int | None = None,
    bad_rows: BadRows | None = None,
    limit: int = MOST_CHECKED,
    seconds: float = 30.0,
    seed: int = 0,
    encode: Callable[[Images, Sample], EncodedSample] | None = None,
    **texts: Any,
) -> PreflightReport:
    """Check all rows of a dataset, or a seeded choice of `limit`, for at most `seconds`.

    The first `limit` rows of a stream are checked, and the first bad one ends the run: the stream
    itself leaves out what cannot be read. Where overlong rows are dropped, the lengths of all
    others are taken, too, without their images.

    Args:
        vocab_size: rows of the model's embedding; None skips that check.
        bad_rows: takes bad rows, if it takes any; then all rows are checked.
        encode: of the collate part, with its arguments; by default a sample becomes one row.
        texts: prompt, prompt_fn and image_token, where there is no `encode`.
    """
    if vocab_size is not None:
        check_vocabulary(processor, vocab_size)
    has_end = not is_stream(dataset)
    if bad_rows is None or not has_end:
        bad_rows = BadRows()
    deadline = time.monotonic() + (float("inf") if bad_rows.limit else seconds)
    rows: Sequence[int] = range(len(dataset) if has_end else limit)
    if has_end and not bad_rows.limit and len(rows) > limit:
        rows = sorted(random.Random(seed).sample(rows, limit))
    if encode is None:
        texts |= {"processor": processor, "pad_token_id": 0, "stage": 1}
        texts |= {"max_token_num": max_token_num, "overlong": overlong}
        as_one_row: Callable[..., EncodedSample] = encode_sft
        encode = functools.partial(as_one_row, **texts)
    expander = ImageExpander.of(processor)
    max_pixels = (ImageSettings() if expander is None else expander.settings).max_pixels
    report = PreflightReport(len(dataset) if has_end else None, overlong)
    takes_all = overlong in DROPPING and has_end
    with_images = set(rows)
    for row in range(len(dataset)) if takes_all else rows:
        try:
            images, sample = read_row(dataset, row)
            report.add(row, encode(images, sample), max_token_num)
            for image in (images or ()) if row in with_images else ():
                check_image(image, name=sample_name(sample), max_pixels=max_pixels)
        except DataError as error:
            bad_rows.take(_source(dataset, row), error)
            report.bad.append(row)
        if time.monotonic() > deadline:
            with_images = set()
            if not takes_all:
                break
    if report.dropped and len(report.dropped) == report.num_checked:
        raise DataError(
            f"all {report.num_checked} rows that were looked at are too long and would be dropped: "
            f"they have {report.shortest} tokens and more, and `max_token_num` is {max_token_num}. "
            "Raise `max_token_num`, or shorten the rows."
        )
    report.num_checked += len(report.bad)
    return report


def _source(dataset: Any, row: int) -> str:
    """Return file and line of a row, so that a row in two splits counts once."""
    if isinstance(dataset, Subset):
        return _source(dataset.dataset, dataset.indices[row])
    return dataset.describe(row) if hasattr(dataset, "describe") else f"row {row}"


class CheckedCollate(CollatePart):
    """A collate part whose micro-batches are checked, ids against `vocab_size` if it is known.

    On a GPU an id without a row in the embedding kills the process and names nothing.
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
        """Return the micro-batch of samples, or of rows of them."""
        batch = call("collate_fn", make, rows, **options)
        came = _problem_of(batch, len(rows))
        if came is not None:
            raise broken(
                "collate_fn",
                make,
                came,
                why="input_ids, attention_mask and labels are integers of one shape, a row or the "
                "same number of rows for each sample",
                cure="return a dict of tensors as collate_sft of stageline.data does",
            )
        if self._vocab_size is not None:
            samples = rows if is_packed else [[sample] for sample in rows]
            _check_ids(batch, self._vocab_size, samples=samples)
        return batch


def _problem_of(batch: object, num_samples: int) -> str | None:
    """Return what is wrong with the types and shapes of a micro-batch."""
    if not isinstance(batch, dict):
        return f"returned {shown(batch)}"
    missing = [name for name in _TENSORS if name not in batch]
    if missing:
        return f"returned {shown(batch)}, without {' and '.join(missing)}"
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            return f"returned {name!r} as {shown(value)}"
    ids = batch["input_ids"]
    for name in _TENSORS:
        value = batch[name]
        is_whole = not value.is_floating_point() and not value.is_complex()
        if value.ndim != 2 or not is_whole or value.shape != ids.shape:
            return f"returned {name!r} as {shown(value)}"
    if len(ids) == 0 or ids.shape[1] == 0 or len(ids) % num_samples:
        return f"made {len(ids)} rows of {ids.shape[1]} tokens out of {num_samples} samples"
    return None


def _check_ids(batch: MicroBatch, vocab_size: int, *, samples: Sequence[Sequence[Any]]) -> None:
    """Refuse token ids and labels for which the model has no row, by (images, sample) of each."""
    labels_BT = batch["labels"].masked_fill(batch["labels"] == IGNORE, 0)
    for kind, values_BT in (("token id", batch["input_ids"]), ("label", labels_BT)):
        is_bad_BT = (values_BT >= vocab_size) | (values_BT < 0)
        if not is_bad_BT.any():
            continue
        number, place = is_bad_BT.nonzero()[0].tolist()
        row = number * len(samples) // len(values_BT)  # a sample may be several rows
        names = [sample_name(sample) for _, sample in samples[row]]
        if "sample_ids" in batch and len(names) > 1:  # a packed row: which of its samples
            own = int(batch["sample_ids"][row, place])
            names = names[own : own + 1] or names
        raise DataError(
            f"{' and '.join(names) or '?'}: the {kind} at place {place} is "
            f"{int(values_BT[number, place])}, and the model's embedding has {vocab_size} rows. "
            "Use the tokenizer that belongs to the model (`processor_path`), or correct the part "
            "that makes the ids."
        )
