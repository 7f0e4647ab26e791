"""A device that stages run on: its queues, and its buffers of weights and gradients.

The controller gives work to queues in one order and never waits for it; marks set the order between
queues. On a CPU a queue works at once, on an accelerator it is a stream. Work is a
function without a result: a queue may run it later.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from stageline.device import accelerators, generators_of, is_accelerator, sleeping_event


@dataclass(frozen=True)
class Mark:
    """A point in a queue: these events on streams have happened. Without any, all is done."""

    events: tuple[torch.Event, ...] = ()

    def wait(self) -> None:
        """Wait until all work before it is done."""
        for event in self.events:
            event.synchronize()


DONE = Mark()


class Queue:
    """Runs what it is given, in order. This one works at once, in the caller's thread."""

    def run(self, work: Callable[[], object]) -> None:
        """Run a function after the work before it."""
        work()

    def record(self) -> Mark:
        """A mark behind what came so far."""
        return DONE

    def after(self, mark: Mark) -> None:
        """Make later work of this queue wait for a mark of any queue."""
        mark.wait()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of another queue until this queue's work is done.

        Called by the work that reads it, before the tensor can be dropped.
        """


class StreamQueue(Queue):
    """A stream of an accelerator."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._module = torch.get_device_module(stream.device)

    def run(self, work: Callable[[], object]) -> None:
        with self._module.stream(self._stream):
            work()

    def record(self) -> Mark:
        event = sleeping_event(self._stream.device)  # it leaves the processor to the optimizer
        event.record(self._stream)
        return Mark((event,))

    def after(self, mark: Mark) -> None:
        for event in mark.events:
            self._stream.wait_event(event)

    def uses(self, tensor: torch.Tensor) -> None:
        if is_accelerator(tensor.device):
            tensor.record_stream(self._stream)


def mark_of_caller(tensors: Iterable[torch.Tensor]) -> Mark:
    """Return the mark where tensors of the caller are ready: lanes do not wait for its streams."""
    devices = set(filter(is_accelerator, (each.device for each in tensors)))
    modules = [(torch.get_device_module(device), device) for device in devices]
    marks = [StreamQueue(module.current_stream(device)).record() for module, device in modules]
    return Mark(tuple(event for mark in marks for event in mark.events))


class DeviceBudgetError(MemoryError):
    """More bytes are needed at once than the budget of a lane allows."""


@dataclass(eq=False)
class Buffer:
    """Bytes of a device, and the mark of the last work that uses them."""

    data: torch.Tensor
    mark: Mark = DONE


class BufferPool:
    """Hands out buffers of one device, idle ones first, within a budget.

    A buffer that was given back may still be read by work on its way: it comes with a mark, and the
    next user's queue waits for that. So nothing depends on when memory is freed.

    Args:
        budget: bytes that all buffers together may have; None: no limit.
        allocate: number of bytes -> uint8 tensor of the device.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.device, self.budget = device, budget
        self.held_bytes = self.peak_bytes = 0
        self._idle: list[Buffer] = []
        plain = functools.partial(torch.empty, dtype=torch.uint8, device=device)
        self._allocate = allocate or plain

    def take(self, num_bytes: int) -> Buffer:
        """Take a buffer of at least `num_bytes`; others may use it up to its mark."""
        most = max(2 * num_bytes, 1 << 16)  # a larger one would be missing where it is needed
        fitting = [each for each in self._idle if num_bytes <= each.data.nbytes <= most]
        if fitting:
            found = min(fitting, key=lambda each: each.data.nbytes)
            self._idle.remove(found)
            return found
        self._make_room(num_bytes)
        data = self._allocate(num_bytes)  # it may fail: only then is it counted
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return Buffer(data)

    def give(self, buffer: Buffer, mark: Mark) -> None:
        """Take a buffer back; work up to `mark` still uses it."""
        buffer.mark = mark
        self._idle.append(buffer)

    def _make_room(self, num_bytes: int) -> None:
        """Drop idle buffers, the largest first, until a new one fits."""
        if self.budget is None:
            return
        idle = sum(each.data.nbytes for each in self._idle)
        if self.held_bytes - idle + num_bytes > self.budget:  # to drop them all would not help
            raise DeviceBudgetError(
                f"{num_bytes:,} bytes are needed on {self.device} next to "
                f"{self.held_bytes - idle:,} in use; the budget is {self.budget:,}. Allow more, or "
                "cut the model into smaller stages (execute_plan)."
            )
        self._idle.sort(key=lambda each: each.data.nbytes)
        while self.held_bytes + num_bytes > self.budget:
            dropped = self._idle.pop()
            dropped.mark.wait()  # its memory may go to others at once
            self.held_bytes -= dropped.data.nbytes


@dataclass
class Lane:
    """A device with three queues: values and weights in, compute, values and gradients out.

    Attributes:
        pool: where buffers come from; it keeps to the lane's budget.
        inputs_budget: bytes of layers' inputs that wait on the device for the backward pass;
            what is above goes to the host meanwhile. None: no limit.
    """

    device: torch.device
    compute: Queue = field(default_factory=Queue)
    inward: Queue = field(default_factory=Queue)
    outward: Queue = field(default_factory=Queue)
    pool: BufferPool = field(default_factory=lambda: BufferPool(torch.device("cpu")))
    inputs_budget: int | None = None

    @classmethod
    def cpu(cls, *, budget: int | None = None) -> "Lane":
        """A lane on the host; `budget` is that of its pool."""
        return cls(torch.device("cpu"), pool=BufferPool(torch.device("cpu"), budget))

    @classmethod
    def streams(
        cls, device: torch.device, *, budget: int | None = None, inputs_budget: int | None = None
    ) -> "Lane":
        """A lane on an accelerator."""
        module = torch.get_device_module(device)
        compute, inward, outward = (StreamQueue(module.Stream(device)) for _ in range(3))
        # a stream apart: its memory is not what another stream has just dropped and still reads
        owner = module.Stream(device)

        def allocate(num_bytes: int) -> torch.Tensor:
            with module.stream(owner):
                data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for queue in (compute, inward, outward):
                queue.after(StreamQueue(owner).record())  # torch hands out the same few streams
                queue.uses(data)  # an engine may be dropped while work is on its way
            return data

        pool = BufferPool(device, budget, allocate)
        return cls(device, compute, inward, outward, pool, inputs_budget)

    def all_done(self) -> Mark:
        """A mark behind all that was given to its queues so far."""
        for queue in (self.inward, self.compute):
            self.outward.after(queue.record())
        return self.outward.record()

    def seed(self, seed: int) -> None:
        """Seed the generators that a layer on this lane draws from."""
        for generator in generators_of([self.device]):
            generator.manual_seed(seed)


def default_lanes() -> list[Lane]:
    """Every accelerator; without one the CPU."""
    lanes = []  # six tenths of the memory are for weights and gradients, one for waiting inputs
    for device in accelerators():
        tenth = torch.get_device_module(device).get_device_properties(device).total_memory // 10
        lanes.append(Lane.streams(device, budget=6 * tenth, inputs_budget=tenth))
    return lanes or [Lane.cpu()]


def lanes_of(devices: Sequence[torch.device], *, budget: int | None) -> list[Lane]:
    """Return a lane for each device; without a budget half of the free memory is for weights."""
    if devices[0].type == "cpu":
        return [Lane.cpu(budget=budget)]
    free = [torch.get_device_module(device).mem_get_info(device)[0] for device in devices]
    return [
        # a tenth is for the inputs of layers that wait for the backward pass
        Lane.streams(device, budget=budget or size // 2, inputs_budget=size // 10)
        for device, size in zip(devices, free, strict=True)
    ]


class OptimizerThread:
    """Adds gradients up and runs the optimizer: jobs, one after the other.

    After one that failed none runs, and every method raises what it raised, with its traceback.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._error: BaseException | None = None
        self._last: Future | None = None

    def submit(self, job: Callable[[], Any]) -> Future:
        """Run a job after those before it; the `result()` of the future raises as well."""
        self.check()
        self._last = self._executor.submit(self._run, job)
        return self._last

    def wait(self) -> None:
        """Wait until all jobs are done."""
        self.wait_for(self._last)

    def wait_for(self, job: Future | None) -> None:
        """Wait until this job and those before it are done."""
        if job is not None:
            job.exception()
        self.check()

    def check(self) -> None:
        """Raise the error of a job."""
        if self._error is not None:
            raise self._error

    def _run(self, job: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return job()
        except BaseException as error:
            self._error = error
            raise
