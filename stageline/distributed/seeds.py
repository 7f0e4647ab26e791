"""Seeds. Everything random follows from one number; no seed depends on a rank.

A seed that depended on the rank would tie a run to its number of processes. Only replicas differ:
they draw other dropout masks for their other samples.
"""

import hashlib
import random

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch, on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # NumPy's global generator takes 32 bits
    torch.manual_seed(seed)


def derive_seed(seed: int, *names: int | str) -> int:
    """A seed for one purpose: `derive_seed(seed, "order", epoch)`.

    Returns:
        0 <= seed < 2**63, the same on every machine; unrelated for different names.
    """
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def replica_seed(seed: int, dp_rank: int) -> int:
    """The seed of a replica's global generators; that of the first is the seed itself."""
    return seed if dp_rank == 0 else derive_seed(seed, "replica", dp_rank)


def derive_generator(
    seed: int, *names: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator with the seed of one purpose."""
    generator = torch.Generator(device=device)
    generator.manual_seed(derive_seed(seed, *names))
    return generator
