"""A device that stages run on: its queues, and the buffers that weights and gradients lie in.

The controller gives work to queues in one order and never waits for it; what must not overtake
is said by marks. On a CPU a queue works at once, on a GPU it is a stream. Work is a function
without a result: a queue may run it later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stageline.streaming.pool import BufferPool


class Mark(Protocol):
    """A point in a queue."""

    def wait(self) -> None:
        """Returns when all work before it is done."""


class Queue(Protocol):
    """Runs what it is given, in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Runs it after what came before."""

    def record(self) -> Mark:
        """A mark behind what came so far."""

    def after(self, mark: Mark) -> None:
        """What comes now waits for a mark of any queue."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until what comes now is done; called by its work."""


class Done:
    """The mark of what is done."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()


class EagerQueue:
    """Works at once, in the caller's thread."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Mark:
        return DONE

    def after(self, mark: Mark) -> None:
        mark.wait()

    def uses(self, tensor: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class CudaMark:
    """An event on a stream."""

    event: "torch.cuda.Event"

    def wait(self) -> None:
        self.event.synchronize()


class CudaQueue:
    """A stream of a GPU."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event)

    def after(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)
        else:
            mark.wait()

    def uses(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda":
            tensor.record_stream(self._stream)


@dataclass
class Lane:
    """A device with three queues: values and weights in, compute, values and gradients out.

    Attributes:
        pool: where buffers come from; it keeps to the lane's budget.
    """

    device: torch.device
    compute: Queue = field(default_factory=EagerQueue)
    inward: Queue = field(default_factory=EagerQueue)
    outward: Queue = field(default_factory=EagerQueue)
    pool: BufferPool = field(default_factory=lambda: BufferPool(torch.device("cpu")))

    @classmethod
    def cpu(cls, *, budget: int | None = None) -> "Lane":
        """A lane on the host.

        Args:
            budget: bytes that weights and gradients may take; None: no limit.
        """
        device = torch.device("cpu")
        return cls(device, pool=BufferPool(device, budget))

    @classmethod
    def cuda(cls, index: int, *, budget: int | None = None) -> "Lane":
        """A lane on a GPU."""
        device = torch.device("cuda", index)
        queues = [CudaQueue(torch.cuda.Stream(device)) for _ in range(3)]
        return cls(device, *queues, pool=BufferPool(device, budget))

    def seed(self, seed: int) -> None:
        """Seeds the generators that a layer on this lane draws from."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)


def default_lanes() -> list[Lane]:
    """Every GPU; without one the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [Lane.cuda(index) for index in range(count)] or [Lane.cpu()]
