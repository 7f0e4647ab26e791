"""One text that tells whether a dataset still is what it was, so that a run may go on with it."""

import hashlib
from typing import Any

from torch.utils.data import Subset


def data_fingerprint(dataset: Any) -> str | None:
    """The fingerprint of a dataset; None where its part offers none.

    A dataset part may offer `fingerprint() -> str`: equal for equal rows in the same order, in
    whatever folder, and another one when a row or a file changes. Keep it cheap: readers have
    hashed the files already, while they read them.
    """
    if isinstance(dataset, Subset):
        inner = data_fingerprint(dataset.dataset)
        return None if inner is None else _digest(inner, *map(str, dataset.indices))
    offered = getattr(dataset, "fingerprint", None)
    return None if offered is None else _digest(offered(), str(len(dataset)))


def _digest(*words: str) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()
