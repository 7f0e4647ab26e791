"""What a timeline shows: spans of ranks, the words for them, the share left blank. Draws nothing.

The record itself is made in the pipeline, which this room does not know.
"""

from collections.abc import Sequence
from typing import Protocol

WAIT = "wait"
# in order of the legend
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    WAIT: "communication wait",
}


class Span(Protocol):
    """What a rank did between two times, in seconds; `kind` is a key of `KIND_NAMES`."""

    @property
    def rank(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def stages_by_rank(spans: Sequence[Span]) -> dict[int, list[int]]:
    """The stages that each rank holds, both in order."""
    held: dict[int, set[int]] = {}
    for span in spans:
        held.setdefault(span.rank, set()).add(span.stage)
    return {rank: sorted(held[rank]) for rank in sorted(held)}


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """First start and last end; zeros for no spans."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    return min(starts, default=0.0), max(ends, default=0.0)


def idle_share(spans: Sequence[Span]) -> float:
    """The share of a picture's rows that no pass fills: the bubble; waits fill nothing."""
    start, end = extent(spans)
    area = len(stages_by_rank(spans)) * (end - start)
    filled = sum(span.end - span.start for span in spans if span.kind != WAIT)
    return 1.0 - filled / area if area > 0 else 0.0
