"""Collate parts: `encode` makes token ids of a sample, `collate` a micro-batch of many samples.

Rendering and tokenizing happen only in `encode`, once a sample: sorting by length, packing,
preflight, preview and collating all use its result. No templates and no tensors here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageline.data.batches.batch import Images, Sample
    from stageline.data.text.encode import Encoded


ROLES = ("anchor", "positive", "negative")  # roles of the samples of a group


@dataclass(frozen=True)
class EncodedSample:
    """A sample and its token ids. It unpacks as (images, sample), like a row of a dataset."""

    images: Images  # decoded only when the micro-batch is made, and only where pixels are needed
    sample: Sample
    rows: Sequence[Encoded]  # rows of legal length; or the segments of its one row
    length: int  # tokens of its longest row, by which samples are sorted and packed
    whole: Sequence[Encoded]  # `rows` before they were cut or dropped
    others: Sequence[Encoded] = ()  # additional rows that a loss requires

    @property
    def is_cut(self) -> bool:
        """Whether it was longer: cut, or dropped."""
        return sum(map(len, self.rows)) < sum(map(len, self.whole))

    def __iter__(self) -> Iterator[Any]:
        return iter((self.images, self.sample))


class CollatePart:
    """Name, docstring and options (the signature) are those of `collate`.

    Each of the three gets all that the run supplies and the part's options, by name.

    Args:
        collate: (samples) -> micro-batch.
        encode: (images, sample) -> EncodedSample; samples then come to `collate` encoded. None:
            they come as (images, sample), and their lengths are not known.
        pack: (rows), each a list of encoded samples -> micro-batch. None: the part can't pack.
    """

    def __init__(
        self,
        collate: Callable[..., Any],
        *,
        encode: Callable[..., EncodedSample] | None = None,
        pack: Callable[..., Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, collate)
        self.collate, self.encode, self.pack = collate, encode, pack

    def __call__(self, samples: Sequence[Any], **options: Any) -> Any:
        """Return a micro-batch of samples, which may be encoded already."""
        return self.collate(samples, **options)

    def bind(self, **options: Any) -> CollatePart:
        """Return the part with some of its arguments."""
        return CollatePart(
            functools.partial(self.collate, **options),
            encode=self.encode and functools.partial(self.encode, **options),
            pack=self.pack and functools.partial(self.pack, **options),
        )


def collate_part(
    *, encode: Callable[..., EncodedSample], pack: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], CollatePart]:
    """Decorate a function that collates encoded samples, to make it a `CollatePart`."""
    return functools.partial(CollatePart, encode=encode, pack=pack)


def as_collate_part(collate: Callable[..., Any]) -> CollatePart:
    """Return the part, with the arguments of partials around it; a plain function is wrapped."""
    if isinstance(collate, CollatePart):
        return collate
    if isinstance(collate, functools.partial):
        inner = as_collate_part(collate.func)
        if inner.encode is not None:
            return inner.bind(**collate.keywords)
    return CollatePart(collate)


def all_encoded(
    samples: Sequence[Any], encode: Callable[..., EncodedSample], **options: Any
) -> list[EncodedSample]:
    """Return all samples encoded; those that are not, (images, sample), are encoded now."""
    return [one if isinstance(one, EncodedSample) else encode(*one, **options) for one in samples]
