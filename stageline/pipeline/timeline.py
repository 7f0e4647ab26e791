"""When each rank did what in one optimizer step: the record, and what follows from it.

Seconds count from the start of the step on each rank's own clock; all ranks start it together.
Pictures are in plotting/timeline.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WAIT = "wait"


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
    ranks = {event.rank for event in events}
    span = max(e.end for e in events) - min(e.start for e in events)
    busy = sum(busy_seconds(events, rank) for rank in ranks)
    return 1.0 - busy / (len(ranks) * span) if span > 0 else 0.0
