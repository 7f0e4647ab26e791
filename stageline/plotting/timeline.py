"""Draws what each rank did in one optimizer step: a bar a rank, measured and ideal. Reads no file.

Both panels have the same time axis, so that the end of the lower one is what could be reached.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stageline.plotting.text import drawable, text_inches

# -- what a timeline shows: spans of ranks, the words for them, the share left blank. Draws nothing
# The record itself is made in the pipeline, which this room does not know.

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


# -------------------------------------------------------------------------------------------------

COLORS = {"F": "#3b75c4", "B": "#d9822b", "I": "#c9a227", "W": "#3f9a5b", WAIT: "#d77a86"}
IDLE = "#e9ebee"
LIGHTEST = 0.55  # how far a rank's last stage goes towards white
BAR_HEIGHT = 0.8  # of a row
DPI = 120
FONT_SIZE = 7  # points, of micro-batch numbers
EDGE = 0.6  # points; a tenth of narrow bars, which would be all edge
# inches
WIDTH, LEFT, RIGHT = 14.0, 1.4, 0.25
ROW, HEAD, FOOT, TOP = 0.36, 0.34, 0.36, 0.56
_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def plot_timeline(
    measured: Sequence[Span],
    ideal: Sequence[Span] | None,
    path: str | Path,
    *,
    title: str,
) -> None:
    """Writes the picture; who looks meanwhile sees the old or the new one, never half of it.

    Args:
        measured: of one step, all ranks; their times have one origin.
        ideal: the same passes in the same order with nothing to wait for but each other.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    timeline_figure(measured, ideal, title=title).savefig(temporary, dpi=DPI, format="png")
    temporary.replace(path)


def timeline_figure(
    measured: Sequence[Span], ideal: Sequence[Span] | None, *, title: str
) -> Figure:
    """The picture: measured above, ideal below, each with its bubble in the heading."""
    panels = [("measured", measured)]
    if ideal:
        panels.append(("ideal: the mean time of each pass, no time for transfers", ideal))
    rows = [max(1, len(stages_by_rank(spans))) for _, spans in panels]
    height = TOP + sum(ROW * count + HEAD + FOOT for count in rows)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    length = max(end - start for start, end in (extent(spans) for _, spans in panels))
    top = height - TOP
    for (name, spans), count in zip(panels, rows, strict=True):
        top -= HEAD + ROW * count
        box = (LEFT / WIDTH, top / height, 1 - (LEFT + RIGHT) / WIDTH, ROW * count / height)
        _draw_panel(figure.add_axes(box), spans, name=name, length=length)
        top -= FOOT
    left = 0.1 / WIDTH
    figure.text(left, 1 - 0.1 / height, drawable(title), va="top", fontsize=11, parse_math=False)
    _add_legend(figure, [span for _, spans in panels for span in spans], height)
    return figure


def _draw_panel(axes: Axes, spans: Sequence[Span], *, name: str, length: float) -> None:
    """Bars of all ranks; the axis is `length` seconds long."""
    start, end = extent(spans)
    _, factor, unit = next(entry for entry in _UNITS if length >= entry[0])
    held = stages_by_rank(spans)
    axes.set(xlim=(0, length * factor or 1.0), ylim=(max(len(held), 1) - 0.5, -0.5))
    idle = [_box(row, 0.0, (end - start) * factor) for row in range(len(held))]
    axes.add_collection(PolyCollection(idle, facecolors=IDLE, linewidths=0), autolim=False)
    _draw_bars(axes, spans, held, factor=factor)
    axes.set_yticks(range(len(held)), [rank_label(rank, held[rank]) for rank in held])
    axes.tick_params(labelsize=8, length=0, axis="y")
    axes.tick_params(labelsize=8, axis="x")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.annotate(
        unit,
        (0, 0),
        (-14, -6.5),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
    )
    seconds = f"{(end - start) * factor:.4g} {unit}"
    heading = f"{name} — bubble {100 * idle_share(spans):.1f} %, {seconds}"
    axes.set_title(heading, fontsize=9, loc="left", pad=4)


def _draw_bars(
    axes: Axes, spans: Sequence[Span], held: dict[int, list[int]], *, factor: float
) -> None:
    """A box a span; a number on those that are wide enough for the widest number."""
    start, _ = extent(spans)
    rows = {rank: row for row, rank in enumerate(held)}
    inches = (WIDTH - LEFT - RIGHT) / axes.get_xlim()[1]
    widest = str(max((span.micro_batch for span in spans), default=0))
    room = text_inches(widest, size=FONT_SIZE) + 0.03
    boxes, colors, edges = [], [], []
    for span in sorted(spans, key=lambda span: span.kind != WAIT):  # waits lie below
        first, last = (span.start - start) * factor, (span.end - start) * factor
        width, color = (last - first) * inches, span_color(span, held)
        boxes.append(_box(rows[span.rank], first, last))
        colors.append(color)
        edges.append(min(EDGE, 72 * width / 10) if span.kind != WAIT else 0.0)
        if span.kind != WAIT and width >= room:
            place = ((first + last) / 2, rows[span.rank])
            _write_number(axes, str(span.micro_batch), place, color)
    bars = PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=edges)
    axes.add_collection(bars, autolim=False)


def span_color(span: Span, held: dict[int, list[int]]) -> str:
    """Of its kind; the later stages of a rank are lighter.

    Args:
        held: the stages of each rank.
    """
    color = COLORS[span.kind]
    most = max(len(stages) for stages in held.values())
    if most == 1 or span.kind == WAIT:
        return color
    share = LIGHTEST * held[span.rank].index(span.stage) / (most - 1)
    return _lighten(color, share)


def _lighten(color: str, share: float) -> str:
    red, green, blue = (channel + (1.0 - channel) * share for channel in to_rgb(color))
    return to_hex((red, green, blue))


def rank_label(rank: int, stages: Sequence[int]) -> str:
    """What stands beside a bar; of many stages the first two and the last."""
    if len(stages) == 1:
        return f"rank {rank}: stage {stages[0]}"
    shown = [str(stage) for stage in stages]
    if len(shown) > 3:
        shown = [*shown[:2], "…", shown[-1]]
    return f"rank {rank}: stages {', '.join(shown).replace('…,', '…')}"


def _write_number(axes: Axes, text: str, place: tuple[float, float], color: str) -> None:
    """The micro-batch, legible on a bar of `color`."""
    red, green, blue = to_rgb(color)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
    axes.text(
        *place,
        text,
        ha="center",
        va="center_baseline",
        fontsize=FONT_SIZE,
        color="white" if is_dark else "#24292f",
        clip_on=True,
    )


def _add_legend(figure: Figure, spans: Sequence[Span], height: float) -> None:
    present = {span.kind for span in spans}
    handles = [
        Patch(facecolor=COLORS[kind], label=name)
        for kind, name in KIND_NAMES.items()
        if kind in present
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if any(len(stages) > 1 for stages in stages_by_rank(spans).values()):
        lighter = _lighten(COLORS["F"], LIGHTEST)
        handles.append(Patch(facecolor=lighter, label="lighter: a later stage of the rank"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.3 / height),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )


def _box(row: int, first: float, last: float) -> list[tuple[float, float]]:
    low, high = row - BAR_HEIGHT / 2, row + BAR_HEIGHT / 2
    return [(first, low), (first, high), (last, high), (last, low)]


# -- writes a timeline as Chrome trace events, for ui.perfetto.dev and chrome://tracing -----------
# A process per rank; in it a thread per stage, and one for waits. Times are in microseconds.
# Format: "Trace Event Format", JSON object form, complete ("X") and metadata ("M") events.


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
