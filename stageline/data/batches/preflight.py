"""Looks through the data before any model is loaded: the first bad row ends the run at once.

Renders and tokenizes rows and decodes their images, on the CPU and without a process group. Where
rows may be left out (bad ones, or too long ones that are dropped), it looks at all of them, however
long it takes: what is left has to be the same on every rank.
"""

import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset

from stageline.data.batches.batch import Images, Sample, sample_name
from stageline.data.batches.collate import encode_sft
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.sampler import is_stream
from stageline.data.batches.step_maker import read_row
from stageline.data.images.image_settings import ImageSettings
from stageline.data.images.images import ImageExpander, check_image
from stageline.data.rows.bad_rows import BadRows
from stageline.data.text.limit import DROPPING, Overlong
from stageline.data.text.processor import get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.errors import DataError, UserError

MOST_CHECKED = 2000  # rows, where all may stay
_SHARED = "prompts and answers are cut"
_HANDLING = {
    "cut_prompt": "their prompts are cut",
    "cut": "their ends are cut",
    "share": _SHARED,
    "drop": "dropped",
    "error": "refused",
}


@dataclass
class PreflightReport:
    """What was looked at so far.

    Attributes:
        num_rows: rows of the dataset; None: a stream.
        what_if_overlong: what happens to rows that are longer than the limit.
        num_checked: rows looked at; fewer where the limit of rows or seconds was reached.
        num_overlong: of those, longer than the limit (they are cut or dropped).
        shortest, longest: tokens of the rows looked at, before they are cut.
        num_tokens, num_targets: sums over the rows looked at.
        num_sequences: what these lie in; a pair of answers is two.
        dropped: numbers of those too long ones of which nothing would be left to learn.
        bad: numbers of the rows to leave out because they are bad.
    """

    num_rows: int | None
    what_if_overlong: str
    num_checked: int = 0
    num_overlong: int = 0
    shortest: int = sys.maxsize
    longest: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_sequences: int = 0
    bad: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        """How many rows are dropped."""
        return len(self.dropped)

    def add(self, row: int, encoded: EncodedSample, max_token_num: int) -> None:
        """Counts a row."""
        length = max(map(len, encoded.whole))
        self.num_checked += 1
        self.num_overlong += length > max_token_num
        self.shortest, self.longest = min(self.shortest, length), max(self.longest, length)
        self.num_sequences += len(encoded.whole)
        self.num_tokens += sum(map(len, encoded.whole))
        self.num_targets += sum(whole.num_targets for whole in encoded.whole)
        if not all(any(one.is_target) for one in encoded.rows):
            self.dropped.append(row)

    def finished(self, max_token_num: int) -> "PreflightReport":
        """The report of all rows; refuses a dataset of which all would be dropped."""
        if self.dropped and self.num_dropped == self.num_checked:
            raise DataError(
                f"all {self.num_dropped} rows that were looked at are too long and would be "
                f"dropped: they have {self.shortest} tokens and more, and `max_token_num` is "
                f"{max_token_num}. Some that fit were expected, because nothing would be learnt: "
                "raise `max_token_num`, or shorten the rows."
            )
        self.num_checked += len(self.bad)
        return self

    def __str__(self) -> str:
        mean = self.num_tokens / max(self.num_sequences, 1)
        share = 100 * self.num_targets / max(self.num_tokens, 1)
        of = "the first rows of a stream" if self.num_rows is None else f"{self.num_rows} rows"
        text = (
            f"{self.num_checked} of {of} checked: {mean:.0f} tokens on average, "
            f"{self.longest} at most, {share:.0f} % learnt"
        )
        if self.num_overlong:
            text += f", {self.num_overlong} too long ({self.what_if_overlong}"
            shares = self.what_if_overlong == _SHARED
            text += f"; {self.num_dropped} dropped: nothing to learn left)" if shares else ")"
        return text + (f", {len(self.bad)} left out" if self.bad else "")


def check_vocabulary(processor: Any, vocab_size: int) -> None:
    """Refuses a tokenizer whose ids the embedding does not have.

    Args:
        vocab_size: rows of the embedding, from the model's (text) config.

    Raises:
        UserError: the largest id is not below `vocab_size`.
    """
    vocabulary = get_tokenizer(processor).get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer has {len(vocabulary)} tokens with ids up to {largest} ({token!r}), the "
            f"model's embedding has {vocab_size} rows. Each id needs a row, because looking it up "
            "fails otherwise: use the tokenizer that belongs to the model (`processor_path`), a "
            "config whose vocab_size is large enough, or `vocab.resize`, which adds rows (as "
            f"resize_token_embeddings({largest + 1}) of the library does)."
        )


def preflight(
    dataset: Any,
    *,
    prompt: str,
    prompt_fn: Callable[..., Rendered],
    image_token: Callable[..., Rendered],
    processor: Any,
    max_token_num: int,
    overlong: Overlong = "error",
    vocab_size: int | None = None,
    bad_rows: BadRows | None = None,
    limit: int = MOST_CHECKED,
    seconds: float = 30.0,
    seed: int = 0,
    encode: Callable[[Images, Sample], EncodedSample] | None = None,
) -> PreflightReport:
    """Checks all rows of a dataset, or a seeded choice of `limit`, for at most `seconds`.

    Of a stream it checks the first `limit` rows, and the first bad one ends the run: the stream
    itself leaves out what cannot be read. Where too long rows are dropped, it takes the lengths of
    all others, too; their images are not looked at.

    Args:
        vocab_size: rows of the model's embedding; None skips that check.
        bad_rows: takes bad rows, if it takes any; then all rows are checked.
        encode: of the collate part, with its arguments; by default a sample becomes one row.

    Raises:
        DataError: for the first bad row: it does not render, has nothing to learn, is too long,
            or has an image that does not decode.
        UserError: the tokenizer does not fit the embedding.
    """
    if vocab_size is not None:
        check_vocabulary(processor, vocab_size)
    if bad_rows is None or is_stream(dataset):
        bad_rows = BadRows()
    rows = _chosen_rows(dataset, seed=seed, limit=None if bad_rows.limit else limit)
    deadline = time.monotonic() + (seconds if not bad_rows.limit else float("inf"))
    texts = {"prompt": prompt, "prompt_fn": prompt_fn, "image_token": image_token}
    if encode is None:
        encode = _encode_as_one_row(processor, max_token_num, overlong, **texts)
    report = PreflightReport(None if is_stream(dataset) else len(dataset), _HANDLING[overlong])
    takes_all = overlong in DROPPING and not is_stream(dataset)
    with_images = set(rows)
    for row in range(len(dataset)) if takes_all else rows:
        try:
            images, sample = read_row(dataset, row)
            encoded = encode(images, sample)
            report.add(row, encoded, max_token_num)
            if row in with_images:
                _check_images(images, sample_name(sample), processor)
        except DataError as error:
            bad_rows.take(_source(dataset, row), error)
            report.bad.append(row)
        if time.monotonic() > deadline:
            with_images = set()
            if not takes_all:
                break
    return report.finished(max_token_num)


def _encode_as_one_row(
    processor: Any, max_token_num: int, overlong: Overlong, **texts: Any
) -> Callable[[Images, Sample], EncodedSample]:
    return functools.partial(
        encode_sft,
        **texts,
        processor=processor,
        max_token_num=max_token_num,
        overlong=overlong,
        pad_token_id=0,
        stage=1,
    )


def _chosen_rows(dataset: Any, *, seed: int, limit: int | None) -> Sequence[int]:
    if is_stream(dataset):
        return range(limit or 0)
    rows = range(len(dataset))
    if limit is None or len(rows) <= limit:
        return rows
    return sorted(random.Random(seed).sample(rows, limit))


def _source(dataset: Any, row: int) -> str:
    """File and line of a row, so that one that is in two splits counts once."""
    if isinstance(dataset, Subset):
        return _source(dataset.dataset, dataset.indices[row])
    return dataset.describe(row) if hasattr(dataset, "describe") else f"row {row}"


def _check_images(images: Images, name: str, processor: Any) -> None:
    expander = ImageExpander.of(processor)
    settings = ImageSettings() if expander is None else expander.settings
    for image in images or ():
        check_image(image, name=name, max_pixels=settings.max_pixels)
