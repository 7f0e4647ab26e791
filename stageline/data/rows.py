"""Reads the rows of a dataset, each with random numbers of its own, and knows their lengths."""

from collections.abc import Callable
from typing import Any

from stageline.data.sampler import has_sampler, is_stream
from stageline.seeds import HostState, derive_seed, seed_host

Item = tuple[Any, Any]  # images, sample


class Rows:
    """The rows of a dataset, as steps ask for them.

    What a row draws (an augmentation) follows from seed, step and its place in the step: not from
    the worker that reads it, the number of replicas, or what was read before. A dataset with a
    true `is_fixed` says that its rows draw nothing, and is read without seeding.

    Args:
        length_of: (images, sample) -> tokens.
    """

    def __init__(self, dataset: Any, length_of: Callable[..., int] | None, *, seed: int) -> None:
        self._dataset = dataset
        self._length_of = length_of
        self._seed = seed
        # no position of a stream comes again, and what has a sampler may have a billion rows
        self._forgets = is_stream(dataset) or has_sampler(dataset)
        self._is_fixed = getattr(dataset, "is_fixed", False)
        self._known: dict[int, int] = {}
        self._drawing: set[int] = set()

    def read(self, row: int, step: int, place: int) -> Item:
        """A row.

        Args:
            place: in the step, over all replicas.
        """
        if self._is_fixed:
            return self._dataset[row]
        seed_host(derive_seed(self._seed, "row", step, place))
        before = HostState()
        item = self._dataset[row]
        if not before.is_current():
            self._drawing.add(row)
        return item

    def length(self, row: int, step: int, place: int, item: Item | None = None) -> int:
        """The length of a row: computed once, unless the row draws and may come out otherwise.

        Args:
            item: the row, where it was read already.
        """
        if row in self._known:
            return self._known[row]
        images, sample = self.read(row, step, place) if item is None else item
        length = self._length_of(images, sample)
        if row not in self._drawing and not self._forgets:
            self._known[row] = length
        return length
