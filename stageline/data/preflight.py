"""Looks through the data before any model is loaded: the first bad row ends the run at once.

Renders and tokenizes rows and decodes their images, on the CPU and without a process group.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stageline.data.batch import Images, sample_name
from stageline.data.collate import encode_for_training
from stageline.data.images import check_image
from stageline.data.limit import Overlong, limit_length
from stageline.data.processor import get_tokenizer
from stageline.data.rendered import Rendered
from stageline.errors import DataError, UserError


@dataclass(frozen=True)
class PreflightReport:
    """What was looked at.

    Attributes:
        num_rows: rows of the dataset.
        num_checked: of them looked at; fewer where the limit of rows or seconds was reached.
        num_overlong: of those, longer than the limit (they are cut or dropped).
        longest: tokens of the longest one, before it is cut.
        num_tokens, num_targets: sums over the rows looked at.
    """

    num_rows: int
    num_checked: int
    num_overlong: int
    longest: int
    num_tokens: int
    num_targets: int

    def __str__(self) -> str:
        mean = self.num_tokens / max(self.num_checked, 1)
        overlong = f", {self.num_overlong} too long" if self.num_overlong else ""
        return (
            f"{self.num_checked} of {self.num_rows} rows checked: {mean:.0f} tokens on average, "
            f"{self.longest} at most, {100 * self.num_targets / max(self.num_tokens, 1):.0f} % "
            f"learnt{overlong}"
        )


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
            "fails otherwise: use the tokenizer that belongs to the model (--processor-path), or "
            "a config whose vocab_size is large enough."
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
    limit: int = 2000,
    seconds: float = 30.0,
    seed: int = 0,
) -> PreflightReport:
    """Checks all rows of a dataset, or a seeded choice of `limit`, for at most `seconds`.

    Args:
        vocab_size: rows of the model's embedding; None skips that check.

    Raises:
        DataError: for the first bad row: it does not render, has nothing to learn, is too long,
            or has an image that does not decode.
        UserError: the tokenizer does not fit the embedding.
    """
    if vocab_size is not None:
        check_vocabulary(processor, vocab_size)
    rows = list(range(len(dataset)))
    if len(rows) > limit:
        rows = sorted(random.Random(seed).sample(rows, limit))
    deadline = time.monotonic() + seconds
    lengths: list[int] = []
    num_targets = 0
    for row in rows:
        images, sample = dataset[row]
        encoded = encode_for_training(
            images,
            sample,
            prompt=prompt,
            prompt_fn=prompt_fn,
            image_token=image_token,
            processor=processor,
        )
        name = sample_name(sample)
        limit_length(encoded, max_token_num=max_token_num, overlong=overlong, name=name, warn=False)
        _check_images(images, name)
        lengths.append(len(encoded))
        num_targets += encoded.num_targets
        if time.monotonic() > deadline:
            break
    return PreflightReport(
        num_rows=len(dataset),
        num_checked=len(lengths),
        num_overlong=sum(length > max_token_num for length in lengths),
        longest=max(lengths, default=0),
        num_tokens=sum(lengths),
        num_targets=num_targets,
    )


def _check_images(images: Images, name: str) -> None:
    for number, image in enumerate(images or ()):
        if not hasattr(image, "convert"):
            raise DataError(
                f"{name}: image {number} is a {type(image).__name__}. A PIL image was expected, "
                "because image processors take those: let the dataset return Image.open(path)."
            )
        check_image(image, name=name)
