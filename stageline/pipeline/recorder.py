"""Record the start and end of the passes of a step, on the clock of the device that runs them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from stageline.device import is_accelerator, synchronize
from stageline.errors import spelled
from stageline.pipeline.plan import Action

WAIT, TRANSFER = "wait", "transfer"
WAITS = (WAIT, TRANSFER)
# names of passes and waits, in order of a legend
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    WAIT: "waits for another stage",
    TRANSFER: "waits for a transfer",
}
EVEN = 0.2  # a split is good while no stage takes more than this share above the mean


@dataclass(frozen=True)
class TimelineEvent:
    """One span of a rank, in seconds since the start of the step, which all ranks begin together.

    Attributes:
        kind: "F", "B", "I", "W" (see `plan.Kind`), or "wait" for a tensor of another rank; where
            `split_waits` told them apart, "wait" for the pass that makes it, then "transfer".
        stage, micro_batch: of the action; of a wait, those of the action that could not start.
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


def stages_by_rank(spans: Sequence[TimelineEvent]) -> dict[int, list[int]]:
    """Return the stages that each rank holds, both in order."""
    held: dict[int, set[int]] = {}
    for span in spans:
        held.setdefault(span.rank, set()).add(span.stage)
    return {rank: sorted(held[rank]) for rank in sorted(held)}


def extent(spans: Sequence[TimelineEvent]) -> tuple[float, float]:
    """Return the first start and the last end; zeros for no spans."""
    return min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0)


def busy_seconds(events: Sequence[TimelineEvent], rank: int) -> float:
    """Return the seconds that a rank computed, waits left out."""
    return sum(e.end - e.start for e in events if e.rank == rank and e.kind not in WAITS)


def split_waits(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Cut each wait where the pass that makes the tensor ended: what is left is the transfer."""
    passes = [event for event in events if event.kind not in WAITS]
    made = {(e.stage, e.kind == "F", e.micro_batch): e.end for e in passes if e.kind != "W"}
    starts: dict[tuple[int, int], list[tuple[float, bool]]] = {}
    for event in passes:
        begin = (event.start, event.kind == "F")
        starts.setdefault((event.stage, event.micro_batch), []).append(begin)
    found = []
    for event in events:
        own = starts.get((event.stage, event.micro_batch), [])
        later = [begin for begin in own if begin[0] >= event.end]
        if event.kind != WAIT or not later:
            found.append(event)
            continue
        _, is_forward = min(later)  # the pass that waited
        maker = event.stage - 1 if is_forward else event.stage + 1
        cut = made.get((maker, is_forward, event.micro_batch), event.end)
        cut = min(max(cut, event.start), event.end)
        parts = (replace(event, end=cut), replace(event, kind=TRANSFER, start=cut))
        found += [part for part in parts if part.end > part.start]
    return found


def bubble(events: Sequence[TimelineEvent]) -> float:
    """Return the share of all ranks' time, from first start to last end, without a pass."""
    ranks, (start, end) = {event.rank for event in events}, extent(events)
    busy = sum(busy_seconds(events, rank) for rank in ranks)
    return 1.0 - busy / (len(ranks) * (end - start)) if end > start else 0.0


def describe_timeline(
    measured: Sequence[TimelineEvent], ideal: Sequence[TimelineEvent] | None
) -> str:
    """Return lines for a person: bubble, what each rank did, which stage to relieve.

    Args:
        ideal: the same passes with nothing to wait for but each other; None: not known.
    """
    shares = []
    for one in [measured, ideal] if ideal else [measured]:
        start, end = extent(one)
        shares.append(f"{100 * bubble(one):.1f} % of {end - start:.3f} s")
    lines = [f"bubble {'; ideal with these pass times: '.join(shares)}"]
    for rank, stages in stages_by_rank(measured).items():
        own = [event for event in measured if event.rank == rank]
        waits, transfers = (
            sum(event.end - event.start for event in own if event.kind == kind) for kind in WAITS
        )
        lines.append(
            f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}): busy "
            f"{busy_seconds(own, rank):.3f} s, waits {waits:.3f} s for other stages, "
            f"{transfers:.3f} s for transfers"
        )
    # the slowest stage, and what would help
    seconds: dict[int, float] = {}
    for event in measured:
        if event.kind not in WAITS:
            seconds[event.stage] = seconds.get(event.stage, 0.0) + event.end - event.start
    if len(seconds) > 1 and any(seconds.values()):
        slowest, fastest = (find(seconds, key=seconds.__getitem__) for find in (max, min))
        excess = seconds[slowest] * len(seconds) / sum(seconds.values()) - 1.0
        if excess > EVEN:
            advice = f"if it has several layers, move one to stage {fastest} (`partition`)"
            above = f"{100 * excess:.0f} % above the mean"
            lines.append(spelled(f"stage {slowest} is the slowest, {above}: {advice}"))
    return "\n".join(lines)


Mark = float | torch.Event


class Recorder:
    """Collects the spans of one rank; `events` turns them into seconds since `start`.

    On an accelerator the marks are events in the stream, so that recording holds nothing up.
    """

    def __init__(self, device: torch.device, *, rank: int) -> None:
        self.device, self.rank = device, rank
        self._spans: list[tuple[Action, str, Mark, Mark]] = []
        self._zero: Mark = 0.0

    def start(self) -> None:
        """Set the clock to zero; ranks call this together."""
        self._spans.clear()
        self._zero = self._mark()

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Time a pass."""
        return self._during(action, action.kind.value)

    def wait(self, action: Action) -> AbstractContextManager[None]:
        """Time the wait of a pass for a tensor of another rank."""
        return self._during(action, WAIT)

    def events(self) -> list[TimelineEvent]:
        """Return all spans since `start`."""
        synchronize(self.device)
        found = []
        for action, kind, *marks in self._spans:
            begin, end = map(self._seconds, marks)
            name = (self.rank, action.stage, kind, action.micro_batch)
            found.append(TimelineEvent(*name, begin, end))
        return found

    @contextmanager
    def _during(self, action: Action, kind: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._spans.append((action, kind, begin, self._mark()))

    def _mark(self) -> Mark:
        if not is_accelerator(self.device):
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        zero: Any = self._zero  # a device has marks of one kind
        return mark - zero if isinstance(mark, float) else zero.elapsed_time(mark) / 1000


class _NoRecorder(Recorder):
    @contextmanager
    def _during(self, action: Action, kind: str) -> Iterator[None]:
        yield


NO_RECORDER = _NoRecorder(torch.device("cpu"), rank=0)
