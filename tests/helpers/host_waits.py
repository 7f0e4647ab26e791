"""Count where the host waits for a card: each wait is a gap in the card's work.

On an emulated card every wait is seen, with the line of the project and that of the package it
called. On a true one torch warns of its own operations, with only the innermost line of Python.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.helpers.emulated_gpu.tensor import CardTensor

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """`with host_waits() as waits:` place -> how often the host waited there, filled at the end.

    A place is `stageline/training/step.py:12`, or `masking_utils.py:307 < stageline/...:12` where
    another package waits. Explicit waits (`synchronize`) count only on emulated cards.
    """
    waits: Counter[str] = Counter()
    cards = CardTensor.cards
    if cards is None:
        with _warned() as said:
            yield waits
        waits.update(
            f"{_below_root(each.filename)}:{each.lineno}"
            for each in said
            if "synchroniz" in str(each.message)
        )
        return
    before = Counter(cards.waits)
    yield waits
    for wait, count in (cards.waits - before).items():
        waits[f"{wait.library} < {wait.place}" if wait.library else wait.place] += count


@contextlib.contextmanager
def _warned() -> Iterator[list[warnings.WarningMessage]]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _below_root(name: str) -> str:
    path = Path(name)
    is_own = path.is_relative_to(ROOT) and "site-packages" not in name
    return str(path.relative_to(ROOT)) if is_own else path.name
