"""Which replica of a model this process belongs to, and where replicas wait for each other.

They exchange no tensors: each answers its share of the samples. They meet in the store of the run,
without a time limit, because one may have hours more to do than another; a launcher that sees one
fail ends the others.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
_SECONDS_BETWEEN_LOOKS = 0.1


class Store(Protocol):
    """What of a store of torch.distributed is used."""

    def set(self, key: str, value: str) -> object:
        """Writes a word that all processes can read."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these were written."""


@dataclass(frozen=True)
class EvaluationReplicas:
    """Where this process stands.

    Attributes:
        index: of its replica.
        count: of replicas.
        is_first: the first process of its replica, which asks and writes; others only compute.
        store: of all processes of the run; None where there is one.
    """

    index: int = 0
    count: int = 1
    is_first: bool = True
    store: Store | None = None

    @property
    def is_main(self) -> bool:
        """The one process that merges, reports and prints."""
        return self.index == 0 and self.is_first

    def share(self, items: Sequence[T]) -> list[T]:
        """This replica's part of what all have to do; every item is in one part."""
        return list(items[self.index :: self.count])

    def tell(self, word: str) -> None:
        """Says that this replica has come so far."""
        if self.store is not None and self.is_first:
            self.store.set(f"stageline/replica/{self.index}/{word}", "1")

    def wait_for_main(self, word: str) -> None:
        """Returns when the main process told this word."""
        self._wait([0], word)

    def wait_for_all(self, word: str) -> None:
        """Returns when all replicas told this word."""
        self._wait(range(self.count), word)

    def _wait(self, replicas: Sequence[int], word: str) -> None:
        names = [f"stageline/replica/{index}/{word}" for index in replicas]
        while self.store is not None and not self.store.check(names):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
