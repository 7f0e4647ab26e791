"""Plays a schedule through with given times: the ideal timeline and its bubble.

Without `hand_over` no time passes between ranks and none is lost on the host: none can be faster.
Pure arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageline.pipeline.plan import Action, GradFlow, Kind, drop_dead_backward, grad_flow, needs
from stageline.pipeline.recorder import TimelineEvent, bubble

Durations = Mapping[tuple[int, Kind], float]  # (stage, kind) -> seconds of one pass


@dataclass(frozen=True)
class Simulation:
    """Every pass of a step with its times, and the seconds of the whole step."""

    events: list[TimelineEvent]
    seconds: float

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time."""
        return bubble(self.events)


def simulate(
    orders: Sequence[Sequence[Action]],
    durations: Durations,
    *,
    num_stages: int,
    flow: GradFlow | None = None,
    hand_over: float = 0.0,
) -> Simulation:
    """Simulate one step.

    Args:
        orders: of each rank.
        durations: seconds of F, and of B or I and W, for each stage; a missing B is I + W.
        flow: which stages have a backward pass; None: all.
        hand_over: seconds from the end of a pass to the start of one on another rank that needs
            its result.
    """
    flow = flow or grad_flow([True] * num_stages)
    kept = drop_dead_backward(orders, flow)
    rank_of_stage = {action.stage: rank for rank, order in enumerate(kept) for action in order}
    ends: dict[Action, float] = {}
    clocks = [0.0] * len(kept)
    places = [0] * len(kept)
    events: list[TimelineEvent] = []
    while len(events) < sum(map(len, kept)):
        num_before = len(events)
        for rank, order in enumerate(kept):
            while places[rank] < len(order):
                action = order[places[rank]]
                # one of each way that it needs
                found = [
                    next((way for way in ways if way in ends), None)
                    for ways in needs(action, len(rank_of_stage))
                ]
                if None in found:
                    break
                ready = 0.0
                for way in filter(None, found):
                    is_near = rank_of_stage[way.stage] == rank
                    ready = max(ready, ends[way] + (0.0 if is_near else hand_over))
                start = max(clocks[rank], ready)
                stage, kind, micro_batch = action
                seconds = durations.get((stage, kind))
                if seconds is None:
                    parts = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
                    seconds = sum(durations[stage, part] for part in parts)
                clocks[rank] = ends[action] = start + seconds
                events.append(
                    TimelineEvent(rank, stage, kind.value, micro_batch, start, ends[action])
                )
                places[rank] += 1
        assert len(events) > num_before, "every rank waits for another"
    return Simulation(events, max(clocks))
