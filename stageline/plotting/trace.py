"""Writes a timeline as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

A process per rank; in it a thread per stage, and one for waits. Times are in microseconds.
Format: "Trace Event Format", JSON object form, complete ("X") and metadata ("M") events.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageline.plotting.spans import KIND_NAMES, WAIT, Span, extent, stages_by_rank


def write_trace(events: Sequence[Span], path: str | Path) -> None:
    """Writes the events as JSON; the same events, in any order, give the same file."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    trace = {"traceEvents": trace_events(events), "displayTimeUnit": "ms"}
    temporary.write_text(json.dumps(trace, indent=0, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def trace_events(events: Sequence[Span]) -> list[dict[str, Any]]:
    """Names of ranks and stages first, then the spans in order of rank and time."""
    held = stages_by_rank(events)
    # a number that is no stage's, and the same in every process
    waits = 1 + max((stage for stages in held.values() for stage in stages), default=0)
    start, _ = extent(events)
    named = []
    for rank, stages in held.items():
        named += _metadata(rank, 0, "process", f"rank {rank}", order=rank)
        for stage in stages:
            named += _metadata(rank, stage, "thread", f"stage {stage}", order=stage)
        if any(event.kind == WAIT for event in events if event.rank == rank):
            named += _metadata(rank, waits, "thread", "waits", order=waits)
    ordered = sorted(events, key=lambda e: (e.rank, e.start, e.end, e.stage, e.kind, e.micro_batch))
    return named + [_complete(event, waits=waits, origin=start) for event in ordered]


def _metadata(rank: int, thread: int, what: str, name: str, *, order: int) -> list[dict[str, Any]]:
    """A name, and the place in the list."""
    place = {"ph": "M", "pid": rank, "tid": thread}
    return [
        {"name": f"{what}_name", **place, "args": {"name": name}},
        {"name": f"{what}_sort_index", **place, "args": {"sort_index": order}},
    ]


def _complete(event: Span, *, waits: int, origin: float) -> dict[str, Any]:
    is_wait = event.kind == WAIT
    return {
        # one colour a kind: Perfetto leaves numbers out when it chooses
        "name": f"{KIND_NAMES[event.kind]} {event.micro_batch}",
        "cat": "wait" if is_wait else "compute",
        "ph": "X",
        "pid": event.rank,
        "tid": waits if is_wait else event.stage,
        "ts": round((event.start - origin) * 1e6, 3),
        "dur": round((event.end - event.start) * 1e6, 3),
        "args": {"stage": event.stage, "micro_batch": event.micro_batch, "kind": event.kind},
    }
