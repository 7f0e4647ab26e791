"""Puts registers back as they were."""

import contextlib
import sys
from collections.abc import Iterator

from register import ALL_REGISTERS


@contextlib.contextmanager
def restored_registers() -> Iterator[None]:
    """Puts every register and the import path back as they were when the block ends."""
    path = list(sys.path)
    before = {
        name: (dict(register.data), register.is_frozen) for name, register in ALL_REGISTERS.items()
    }
    try:
        yield
    finally:
        sys.path[:] = path
        for name, (data, is_frozen) in before.items():
            ALL_REGISTERS[name].data, ALL_REGISTERS[name].is_frozen = data, is_frozen
