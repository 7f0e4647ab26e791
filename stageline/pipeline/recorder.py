"""Records when the passes of a step start and end, on the clock of the device that runs them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stageline.pipeline.actions import Action
from stageline.pipeline.timeline import WAIT, TimelineEvent

Mark = float | torch.cuda.Event


class Recorder:
    """Collects the spans of one rank; `events` turns them into seconds since `start`.

    On a GPU the marks are events in the stream, so that recording holds nothing up.
    """

    def __init__(self, device: torch.device, *, rank: int) -> None:
        self.device = device
        self.rank = rank
        self._spans: list[tuple[Action, str, Mark, Mark]] = []
        self._zero: Mark = 0.0

    def start(self) -> None:
        """Sets the clock to zero; ranks call this together."""
        self._spans.clear()
        self._zero = self._mark()

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """The time of a pass."""
        with self._during(action, action.kind.value):
            yield

    @contextmanager
    def wait(self, action: Action) -> Iterator[None]:
        """The time that a pass waits for a tensor of another rank."""
        with self._during(action, WAIT):
            yield

    def events(self) -> list[TimelineEvent]:
        """All spans since `start`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [
            TimelineEvent(
                self.rank,
                action.stage,
                kind,
                action.micro_batch,
                self._seconds(begin),
                self._seconds(end),
            )
            for action, kind, begin, end in self._spans
        ]

    @contextmanager
    def _during(self, action: Action, kind: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._spans.append((action, kind, begin, self._mark()))

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark - self._zero
        return self._zero.elapsed_time(mark) / 1000


class _NoRecorder(Recorder):
    """Records nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), rank=0)

    @contextmanager
    def _during(self, action: Action, kind: str) -> Iterator[None]:
        yield


NO_RECORDER = _NoRecorder()
