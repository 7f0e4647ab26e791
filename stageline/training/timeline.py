"""The timeline of one optimizer step, as a trace; `stageline/plotting/figures.py` draws it."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch.distributed as dist

from stageline.pipeline.plan import Kind
from stageline.pipeline.recorder import (
    KIND_NAMES,
    NO_RECORDER,
    WAITS,
    Recorder,
    TimelineEvent,
    extent,
    split_waits,
)
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.simulate import Durations, simulate

BUBBLE_EVERY = 10  # steps between two measurements of the bubble


class StepTimeline:
    """A record of step `step` (from 0; below 0: none) and every tenth one."""

    def __init__(self, runner: PipelineRunner, *, step: int) -> None:
        self.runner, self.step, self._num_micro_batches = runner, step, 0
        self._recorder = Recorder(runner.device, rank=runner.pp_rank)

    def is_timed(self, step: int) -> bool:
        """Whether the passes of this step are recorded."""
        is_tenth = self.runner.schedule.num_ranks > 1 and (step + 1) % BUBBLE_EVERY == 0
        return self.step >= 0 and (step == self.step or is_tenth)

    def recorder(self, step: int, *, num_micro_batches: int) -> Recorder:
        """Return the recorder of this step; ranks start the clock together."""
        if not self.is_timed(step):
            return NO_RECORDER
        self._num_micro_batches = num_micro_batches
        dist.barrier(group=self.runner.group)
        self._recorder.start()
        return self._recorder

    def measured(self) -> list[TimelineEvent]:
        """Return what all ranks did in a timed step; every rank calls this."""
        gathered: list[list[TimelineEvent]] = [[] for _ in range(self.runner.schedule.num_ranks)]
        dist.all_gather_object(gathered, self._recorder.events(), group=self.runner.group)
        return split_waits([event for events in gathered for event in events])

    def ideal(self, measured: Sequence[TimelineEvent]) -> list[TimelineEvent]:
        """Return the same passes with mean times, waiting only for each other."""
        schedule = self.runner.schedule
        return simulate(
            schedule.orders(self._num_micro_batches),
            mean_durations(measured),
            num_stages=schedule.num_stages,
            flow=self.runner.flow,
        ).events


def mean_durations(events: Sequence[TimelineEvent]) -> Durations:
    """Return (stage, kind) -> the mean seconds of a pass."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for event in events:
        if event.kind not in WAITS:
            seconds[event.stage, Kind(event.kind)].append(event.end - event.start)
    return {key: mean(values) for key, values in seconds.items()}


def write_trace(events: Sequence[TimelineEvent], path: Path) -> None:
    """Write Chrome trace events, in us, by rank and time: a process is a rank, a thread a stage.

    Waits have a thread of their own behind those of the stages.
    """
    waits = 1 + max((event.stage for event in events), default=0)
    origin, _ = extent(events)
    ordered = sorted(events, key=lambda e: (e.rank, e.start, e.end, e.stage, e.kind, e.micro_batch))
    spans = [
        {
            # one colour a kind: Perfetto leaves numbers out when it chooses
            "name": f"{KIND_NAMES[event.kind]} {event.micro_batch}",
            "cat": event.kind if event.kind in WAITS else "compute",
            "ph": "X",
            "pid": event.rank,
            "tid": waits if event.kind in WAITS else event.stage,
            "ts": round((event.start - origin) * 1e6, 3),
            "dur": round((event.end - event.start) * 1e6, 3),
            "args": {name: getattr(event, name) for name in ("stage", "micro_batch", "kind")},
        }
        for event in ordered
    ]
    trace = {"traceEvents": spans, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(trace, indent=0, allow_nan=False) + "\n", encoding="utf-8")
