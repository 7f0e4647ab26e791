"""Show samples as a run trains on them: the tokens of a micro-batch, coloured if in the loss.

Only input_ids and labels are read, so any collate part can be shown, packed or not.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

import torch

from stageline.contracts import IGNORE
from stageline.data.batches.batch import MicroBatch, sample_name
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.text.processor import get_tokenizer

_LEARNT = ("\x1b[1;32m", "\x1b[1;4;32m")  # in turn, so that tokens can be told from each other
_OTHER = ("\x1b[2m", "\x1b[0;90m")
_PLAIN = "\x1b[0m"
_MOST_ALIKE = 4  # added tokens in a row, as images have
_LONGEST_CHARACTER = 8  # tokens


@dataclass(frozen=True)
class Shown:
    """One sample of a micro-batch."""

    row: int  # its row in the dataset; -1 if not known
    input_ids: list[int]
    is_learnt: list[bool]


def preview(
    loader: MicroBatchLoader,
    dataset: Any,
    processor: Any,
    *,
    count: int,
    full_length: Callable[[int], int] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the first `count` samples of training, in the order in which they are trained on."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    tokenizer = get_tokenizer(processor)
    has_colour = stream.isatty() and not os.environ.get("NO_COLOR")
    for number, shown in zip(range(count), samples_of(loader), strict=False):
        length, learnt = len(shown.input_ids), sum(shown.is_learnt)
        name = f"{length} tokens, {learnt} learnt ({100 * learnt / max(length, 1):.0f} %)"
        if shown.row >= 0:
            full = full_length(shown.row) if full_length is not None else length
            if full > length:
                name += f", {'cut from' if learnt else 'dropped: it has'} {full} tokens"
            name = f"{sample_name(dataset[shown.row][1])}, row {shown.row}, {name}"
        print(f"-- sample {number + 1} of {count}: {name}", file=stream)
        text = paint(shown, tokenizer) if has_colour else bracket(shown, tokenizer)
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    how = "in colour is learnt" if has_colour else "in [[ ]] is learnt"
    print(f"-- {how}", file=stream, flush=True)


def samples_of(loader: MicroBatchLoader) -> Iterator[Shown]:
    """Yield the samples of a run, in their order; decodes them in this process."""
    for step, shares in enumerate(loader.sampler.shares(loader.start_step), loader.start_step):
        made = loader.step_maker[(step, shares)]
        if isinstance(made, Exception):
            raise made
        for batch in made:
            yield from split(batch)


def split(batch: MicroBatch) -> Iterator[Shown]:
    """Yield the samples of a micro-batch, without padding."""
    ids_BT, labels_BT, mask_BT = batch["input_ids"], batch["labels"], batch["attention_mask"].bool()
    samples_BT = batch.get("sample_ids", torch.zeros_like(ids_BT))
    known = batch.get("loss_packed_rows", batch.get("loss_rows", torch.tensor([]))).tolist()
    found = []
    for ids_T, labels_T, mask_T, samples_T in zip(
        ids_BT, labels_BT, mask_BT, samples_BT, strict=True
    ):
        for sample in samples_T[mask_T].unique().tolist():
            place_T = mask_T & (samples_T == sample)
            found.append((ids_T[place_T].tolist(), (labels_T[place_T] != IGNORE).tolist()))
    # pairs come twice, as [chosen ..., rejected ...]: a row for each
    times, rest = divmod(len(found), max(len(known), 1))
    rows = known * times if known and not rest else [-1] * len(found)
    for row, (ids, is_learnt) in zip(rows, found, strict=True):
        yield Shown(row, ids, is_learnt)


def bracket(shown: Shown, tokenizer: Any) -> str:
    """Return the text with [[ ]] around the tokens in the loss."""
    runs = groupby(_units(shown, tokenizer), key=lambda unit: unit[1])
    texts = [(is_learnt, "".join(text for text, _ in run)) for is_learnt, run in runs]
    return "".join(f"[[{text}]]" if is_learnt else text for is_learnt, text in texts)


def paint(shown: Shown, tokenizer: Any) -> str:
    """Return the text in colours of a terminal; neighbouring tokens look different."""
    units = enumerate(_units(shown, tokenizer))
    return "".join(
        f"{(_LEARNT if is_learnt else _OTHER)[number % 2]}{text}{_PLAIN}"
        for number, (text, is_learnt) in units
    )


def _units(shown: Shown, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Yield (text, in the loss) of each token, or of tokens that make one character together."""
    for unit, alike in groupby(_read(shown, tokenizer)):
        count = len(list(alike))
        text, is_learnt = unit
        if count > _MOST_ALIKE and text in tokenizer.get_added_vocab():
            yield f"{text}(x{count})", is_learnt
        else:
            yield from [unit] * count


def _read(shown: Shown, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Yield text and whether it is in the loss; decoded in a row, for spaces between tokens."""
    ids, before, read = shown.input_ids, 0, 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:end])
        if text.endswith("\ufffd") and end < len(ids) and end - read < _LONGEST_CHARACTER:
            continue
        own = text[len(tokenizer.decode(ids[before:read])) :] if read else text
        # nothing that would steer a terminal
        clean = [char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in own]
        yield "".join(clean), any(shown.is_learnt[read:end])
        before, read = read, end
