"""Times the passes of one optimizer step on all ranks, and what its schedule could be at best."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

import torch.distributed as dist

from stageline.pipeline.plan import Kind
from stageline.pipeline.recorder import NO_RECORDER, WAIT, Recorder, TimelineEvent
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.simulate import Durations, simulate


class StepTimeline:
    """Records step number `step`, and no other: timing a GPU costs a little.

    Args:
        step: counted from 0; the first ones are slower than the rest.
    """

    def __init__(self, runner: PipelineRunner, *, step: int) -> None:
        self.runner = runner
        self.step = step
        self._num_micro_batches = 0
        self._recorder = Recorder(runner.device, rank=runner.pp_rank)

    def recorder(self, step: int, *, num_micro_batches: int) -> Recorder:
        """What the runner gets for this step; ranks start the clock together."""
        if step != self.step:
            return NO_RECORDER
        self._num_micro_batches = num_micro_batches
        dist.barrier(group=self.runner.group)
        self._recorder.start()
        return self._recorder

    def gather(self) -> tuple[list[TimelineEvent], list[TimelineEvent]]:
        """After the step; every rank calls this.

        Returns:
            What all ranks did, and the same passes with their mean times and no other waiting than
            for each other.
        """
        gathered: list[list[TimelineEvent]] = [[] for _ in range(self.runner.schedule.num_ranks)]
        dist.all_gather_object(gathered, self._recorder.events(), group=self.runner.group)
        measured = [event for events in gathered for event in events]
        schedule = self.runner.schedule
        ideal = simulate(
            schedule.orders(self._num_micro_batches),
            mean_durations(measured),
            num_stages=schedule.num_stages,
            flow=self.runner.flow,
        )
        return measured, ideal.events


def mean_durations(events: Sequence[TimelineEvent]) -> Durations:
    """(stage, kind) -> the mean seconds of a pass."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for event in events:
        if event.kind != WAIT:
            seconds[event.stage, Kind(event.kind)].append(event.end - event.start)
    return {key: mean(values) for key, values in seconds.items()}
