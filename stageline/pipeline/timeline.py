"""When each rank did what in one optimizer step: the record, and what follows from it.

Seconds count from the start of the step on each rank's own clock; all ranks start it together.
Pictures are in plotting/timeline.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WAIT = "wait"
EVEN = 0.1  # stages whose times are no further above their mean need no other split


@dataclass(frozen=True)
class TimelineEvent:
    """One span of a rank.

    Attributes:
        kind: "F", "B", "I", "W" (see `actions.Kind`), or "wait" for a tensor of another rank.
        stage, micro_batch: of the action; of a wait, those of the action that could not start.
        start, end: seconds.
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


def busy_seconds(events: Sequence[TimelineEvent], rank: int) -> float:
    """What a rank computed, waits left out."""
    return sum(e.end - e.start for e in events if e.rank == rank and e.kind != WAIT)


def bubble(events: Sequence[TimelineEvent]) -> float:
    """The share of all ranks' time, from first start to last end, in which nothing was computed.

    Returns:
        1 - busy / (ranks x span); 0 for no events.
    """
    if not events:
        return 0.0
    ranks, span = {event.rank for event in events}, _span(events)
    busy = sum(busy_seconds(events, rank) for rank in ranks)
    return 1.0 - busy / (len(ranks) * span) if span > 0 else 0.0


def describe_timeline(
    measured: Sequence[TimelineEvent], ideal: Sequence[TimelineEvent] | None
) -> str:
    """Lines for a person: bubble, what each rank did, which stage to relieve.

    Args:
        ideal: the same passes with nothing to wait for but each other; None: not known.
    """
    lines = [_describe_bubble(measured, ideal)]
    for rank in sorted({event.rank for event in measured}):
        own = [event for event in measured if event.rank == rank]
        stages = sorted({event.stage for event in own})
        waits = sum(event.end - event.start for event in own if event.kind == WAIT)
        named = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        busy = busy_seconds(own, rank)
        lines.append(f"rank {rank} ({named}): busy {busy:.3f} s, waits {waits:.3f} s")
    return "\n".join(lines + _advise(measured))


def _describe_bubble(
    measured: Sequence[TimelineEvent], ideal: Sequence[TimelineEvent] | None
) -> str:
    text = f"bubble {100 * bubble(measured):.1f} % of {_span(measured):.3f} s"
    if not ideal:
        return text
    return (
        f"{text}; ideal with these pass times: {100 * bubble(ideal):.1f} % of {_span(ideal):.3f} s"
    )


def _advise(events: Sequence[TimelineEvent]) -> list[str]:
    """The slowest stage and what would help; nothing for one stage."""
    seconds: dict[int, float] = {}
    for event in events:
        if event.kind != WAIT:
            seconds[event.stage] = seconds.get(event.stage, 0.0) + event.end - event.start
    if len(seconds) < 2 or not any(seconds.values()):
        return []
    slowest, fastest = max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)
    excess = seconds[slowest] * len(seconds) / sum(seconds.values()) - 1.0
    if excess <= EVEN:
        return [f"stage {slowest} is the slowest, only {100 * excess:.0f} % above the mean"]
    return [
        f"stage {slowest} is the slowest, {100 * excess:.0f} % above the mean: move a layer from "
        f"it to stage {fastest}, the fastest (--partition)"
    ]


def _span(events: Sequence[TimelineEvent]) -> float:
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)
