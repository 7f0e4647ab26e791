"""Derive all seeds from one number; no seed depends on a rank or on the past.

So another number of stages, another schedule and a resumed run draw the same numbers, and no state
of a generator has to be saved.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch

_MASK = 2**64 - 1


def derive_seed(seed: int, *names: int | str) -> int:
    """Return a seed below 2**63 for one purpose: `derive_seed(seed, "order", epoch)`."""
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def mix_seed(base: int, index: int) -> int:
    """Return output `index` of a SplitMix64 from `base`: six times as fast as `derive_seed`."""
    value = (base + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on every device."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch that draw on the host."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # NumPy's global generator takes 32 bits
    # not torch.manual_seed: it goes through all backends, which takes 80 times as long
    torch.default_generator.manual_seed(seed)


class HostState:
    """The generators that `seed_host` seeds, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # a dict only where it is asked for
        self._numpy = cast(tuple[Any, ...], numpy.random.get_state())
        self._torch = torch.get_rng_state()

    def put_back(self) -> None:
        """Restore the generators to the recorded state."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    def is_current(self) -> bool:
        """Return whether nothing was drawn since then."""
        now = HostState()
        return (
            now._python == self._python
            and now._numpy[2:] == self._numpy[2:]
            and (now._numpy[1] == self._numpy[1]).all()
            and torch.equal(now._torch, self._torch)
        )


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Restore the host's generators afterwards."""
    state = HostState()
    try:
        yield
    finally:
        state.put_back()
