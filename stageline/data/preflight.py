"""Looks through the data before any model is loaded: the first bad row ends the run at once.

Renders and tokenizes rows and decodes their images, on the CPU and without a process group. Where
rows may be left out (bad ones, or too long ones that are dropped), it looks at all of them, however
long it takes: what is left has to be the same on every rank.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset

from stageline.data.bad_rows import BadRows
from stageline.data.batch import Images, Sample, sample_name
from stageline.data.check_batch import check_encoded
from stageline.data.collate import encode_for_training
from stageline.data.encode import Encoded
from stageline.data.image_settings import ImageSettings
from stageline.data.images import ImageExpander, check_image
from stageline.data.limit import DROPPING, Overlong, limit_length
from stageline.data.processor import get_tokenizer
from stageline.data.rendered import Rendered
from stageline.data.rows import read_row
from stageline.data.sampler import is_stream
from stageline.errors import DataError, UserError

_SHARED = "prompts and answers are cut"


@dataclass(frozen=True)
class PreflightReport:
    """What was looked at.

    Attributes:
        num_rows: rows of the dataset; None: a stream.
        num_checked: of them looked at; fewer where the limit of rows or seconds was reached.
        num_overlong: of those, longer than the limit (they are cut or dropped).
        longest: tokens of the longest one, before it is cut.
        num_tokens, num_targets: sums over the rows looked at.
        what_if_overlong: what happens to those that are longer.
        dropped: numbers of those too long ones of which nothing would be left to learn.
        bad: numbers of the rows to leave out because they are bad.
    """

    num_rows: int | None
    num_checked: int
    num_overlong: int
    longest: int
    num_tokens: int
    num_targets: int
    what_if_overlong: str = "refused"
    bad: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        """How many rows are dropped."""
        return len(self.dropped)

    def __str__(self) -> str:
        mean = self.num_tokens / max(self.num_checked, 1)
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
            "fails otherwise: use the tokenizer that belongs to the model (--processor-path), a "
            "config whose vocab_size is large enough, or --resize-vocab, which adds rows (as "
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
    limit: int = 2000,
    seconds: float = 30.0,
    seed: int = 0,
    encode: Callable[..., list[Encoded]] | None = None,
) -> PreflightReport:
    """Checks all rows of a dataset, or a seeded choice of `limit`, for at most `seconds`.

    Of a stream it checks the first `limit` rows, and the first bad one ends the run: the stream
    itself leaves out what cannot be read. Where too long rows are dropped, it takes the lengths of
    all others, too; their images are not looked at.

    Args:
        vocab_size: rows of the model's embedding; None skips that check.
        bad_rows: takes bad rows, if it takes any; then all rows are checked.
        encode: (images, sample, **texts) -> the rows that the collate part makes of a sample.

    Raises:
        DataError: for the first bad row: it does not render, has nothing to learn, is too long,
            or has an image that does not decode.
        UserError: the tokenizer does not fit the embedding.
    """
    if vocab_size is not None:
        check_vocabulary(processor, vocab_size)
    bad_rows = BadRows() if bad_rows is None else bad_rows
    if is_stream(dataset):
        bad_rows = BadRows()
    rows = _chosen_rows(dataset, seed=seed, limit=None if bad_rows.limit else limit)
    deadline = time.monotonic() + (seconds if not bad_rows.limit else float("inf"))
    check = _RowCheck(max_token_num, overlong, vocab_size, encode or encode_one)
    texts = {"prompt": prompt, "prompt_fn": prompt_fn, "image_token": image_token}
    takes_all = overlong in DROPPING and not is_stream(dataset)
    with_images = set(rows)
    bad: list[int] = []
    for row in range(len(dataset)) if takes_all else rows:
        try:
            images, sample = read_row(dataset, row)
            check(row, images, sample, processor=processor, **texts)
            if row in with_images:
                _check_images(images, sample_name(sample), processor)
        except DataError as error:
            bad_rows.take(_source(dataset, row), error)
            bad.append(row)
        if time.monotonic() > deadline:
            with_images = set()
            if not takes_all:
                break
    return check.report(None if is_stream(dataset) else len(dataset), bad)


def _chosen_rows(dataset: Any, *, seed: int, limit: int | None) -> Sequence[int]:
    if is_stream(dataset):
        return range(limit or 0)
    rows = range(len(dataset))
    if limit is None or len(rows) <= limit:
        return rows
    return sorted(random.Random(seed).sample(rows, limit))


class _RowCheck:
    """Looks at one row after the other, and counts."""

    def __init__(
        self,
        max_token_num: int,
        overlong: Overlong,
        vocab_size: int | None,
        encode: Callable[..., list[Encoded]],
    ) -> None:
        self.max_token_num = max_token_num
        self.overlong = overlong
        self.vocab_size = vocab_size
        self.encode = encode
        self.lengths: list[int] = []
        self.num_tokens = 0
        self.num_targets = 0
        self.dropped: list[int] = []

    def __call__(self, row: int, images: Images, sample: Sample, **texts: Any) -> None:
        name = sample_name(sample)
        rows = self.encode(images, sample, **texts)
        limit = {"max_token_num": self.max_token_num, "overlong": self.overlong}
        is_dropped = False
        for encoded in rows:
            if self.vocab_size is not None:
                check_encoded(encoded.input_ids, self.vocab_size, name=name)
            limited = limit_length(encoded, **limit, name=name, warn=False)
            is_dropped |= not any(limited.is_target)
        if is_dropped:
            self.dropped.append(row)
        self.lengths.append(max(map(len, rows)))
        self.num_tokens += sum(map(len, rows))
        self.num_targets += sum(encoded.num_targets for encoded in rows)

    def report(self, num_rows: int | None, bad: list[int]) -> PreflightReport:
        self._check_some_left()
        cures = {
            "cut_prompt": "their prompts are cut",
            "cut": "their ends are cut",
            "share": _SHARED,
            "drop": "dropped",
            "error": "refused",
        }
        return PreflightReport(
            num_rows=num_rows,
            num_checked=len(self.lengths) + len(bad),
            num_overlong=sum(length > self.max_token_num for length in self.lengths),
            longest=max(self.lengths, default=0),
            num_tokens=self.num_tokens,
            num_targets=self.num_targets,
            what_if_overlong=cures[self.overlong],
            bad=bad,
            dropped=self.dropped,
        )

    def _check_some_left(self) -> None:
        if self.dropped and len(self.dropped) == len(self.lengths):
            raise DataError(
                f"all {len(self.dropped)} rows that were looked at are too long and would be "
                f"dropped: they have {min(self.lengths)} tokens and more, and --max-token-num is "
                f"{self.max_token_num}. Some that fit were expected, because nothing would be "
                "learnt: raise --max-token-num, or shorten the rows."
            )


def encode_one(images: Images, sample: Sample, **texts: Any) -> list[Encoded]:
    """The one row that most collate parts make of a sample."""
    return [encode_for_training(images, sample, **texts)]


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
