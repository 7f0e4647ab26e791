"""The state of the random numbers at one moment, so that dropout can be drawn a second time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """Remembers the generators of the host and of one device as they are now."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.get_rng_state()
        self.device = device if device.type == "cuda" else None
        self.on_device = torch.cuda.get_rng_state(device) if self.device else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws the same numbers again inside; afterwards the generators are as before."""
        with torch.random.fork_rng(devices=[self.device] if self.device else []):
            torch.set_rng_state(self.host)
            if self.device:
                torch.cuda.set_rng_state(self.on_device, self.device)
            yield
