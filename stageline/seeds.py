"""Derive all seeds from one number; no seed depends on a rank or on the past.

So another number of stages, another schedule and a resumed run draw the same numbers, and no state
of a generator has to be saved.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Restore the host's generators afterwards."""
    python, own, tensors = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(own)
        torch.set_rng_state(tensors)
