"""The timeline of one optimizer step: times the passes of all ranks, draws them, writes a trace.

The picture has a bar a rank, measured above and ideal below. Both panels have the same time axis,
so that the end of the lower one is what could be reached.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stageline.pipeline.plan import Kind
from stageline.pipeline.recorder import (
    NO_RECORDER,
    TRANSFER,
    WAIT,
    WAITS,
    Recorder,
    TimelineEvent,
    bubble,
    split_waits,
)
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.simulate import Durations, simulate
from stageline.plotting.pictures import drawable, save_figure, text_inches

BUBBLE_EVERY = 10  # steps between two measurements of the bubble


class StepTimeline:
    """Records step number `step` and every tenth, but no other: timing a GPU costs a little.

    Args:
        step: counted from 0; the first ones are slower than the rest. Below 0: none is recorded.
    """

    def __init__(self, runner: PipelineRunner, *, step: int) -> None:
        self.runner = runner
        self.step = step
        self._num_micro_batches = 0
        self._recorder = Recorder(runner.device, rank=runner.pp_rank)

    def is_timed(self, step: int) -> bool:
        """Whether the passes of this step are recorded; the same on all ranks."""
        is_tenth = self.runner.schedule.num_ranks > 1 and (step + 1) % BUBBLE_EVERY == 0
        return self.step >= 0 and (step == self.step or is_tenth)

    def recorder(self, step: int, *, num_micro_batches: int) -> Recorder:
        """What the runner gets for this step; ranks start the clock together."""
        if not self.is_timed(step):
            return NO_RECORDER
        self._num_micro_batches = num_micro_batches
        dist.barrier(group=self.runner.group)
        self._recorder.start()
        return self._recorder

    def measured(self) -> list[TimelineEvent]:
        """After a timed step, what all ranks did; every rank calls this."""
        gathered: list[list[TimelineEvent]] = [[] for _ in range(self.runner.schedule.num_ranks)]
        dist.all_gather_object(gathered, self._recorder.events(), group=self.runner.group)
        return split_waits([event for events in gathered for event in events])

    def ideal(self, measured: Sequence[TimelineEvent]) -> list[TimelineEvent]:
        """The same passes with mean times, waiting for nothing but each other."""
        schedule = self.runner.schedule
        return simulate(
            schedule.orders(self._num_micro_batches),
            mean_durations(measured),
            num_stages=schedule.num_stages,
            flow=self.runner.flow,
        ).events


def mean_durations(events: Sequence[TimelineEvent]) -> Durations:
    """(stage, kind) -> the mean seconds of a pass."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for event in events:
        if event.kind not in WAITS:
            seconds[event.stage, Kind(event.kind)].append(event.end - event.start)
    return {key: mean(values) for key, values in seconds.items()}


# in order of the legend
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    WAIT: "waits for another stage",
    TRANSFER: "waits for a transfer",
}
COLORS = {"F": "#3b75c4", "B": "#d9822b", "I": "#c9a227", "W": "#3f9a5b"}
COLORS |= {WAIT: "#e3a5ad", TRANSFER: "#7d4fa3"}
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
    measured: Sequence[TimelineEvent],
    ideal: Sequence[TimelineEvent] | None,
    path: Path,
    *,
    title: str,
) -> None:
    """Writes the picture of `timeline_figure`."""
    save_figure(timeline_figure(measured, ideal, title=title), path, dpi=DPI)


def timeline_figure(
    measured: Sequence[TimelineEvent], ideal: Sequence[TimelineEvent] | None, *, title: str
) -> Figure:
    """The picture: measured above, ideal below, each with its bubble in the heading.

    Args:
        measured: of one step, all ranks.
        ideal: the same passes in the same order with nothing to wait for but each other.
    """
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


def _draw_panel(axes: Axes, spans: Sequence[TimelineEvent], *, name: str, length: float) -> None:
    """Bars of all ranks; the axis is `length` seconds long."""
    start, end = extent(spans)
    _, factor, unit = next(entry for entry in _UNITS if length >= entry[0])
    held = stages_by_rank(spans)
    axes.set(xlim=(0, length * factor or 1.0), ylim=(max(len(held), 1) - 0.5, -0.5))
    for row in range(len(held)):
        axes.broken_barh([(0.0, (end - start) * factor)], _height(row), facecolors=IDLE, lw=0)
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
    heading = f"{name} — bubble {100 * bubble(spans):.1f} %, {seconds}"
    axes.set_title(heading, fontsize=9, loc="left", pad=4)


def _draw_bars(
    axes: Axes, spans: Sequence[TimelineEvent], held: dict[int, list[int]], *, factor: float
) -> None:
    """A box a span; a number on those that are wide enough for the widest number."""
    start, _ = extent(spans)
    inches = (WIDTH - LEFT - RIGHT) / axes.get_xlim()[1]
    widest = str(max((span.micro_batch for span in spans), default=0))
    room = text_inches(widest, size=FONT_SIZE) + 0.03
    for row, rank in enumerate(held):
        own = [span for span in spans if span.rank == rank]
        own.sort(key=lambda span: span.kind not in WAITS)  # waits lie below
        boxes, colors, edges = [], [], []
        for span in own:
            first, length = (span.start - start) * factor, (span.end - span.start) * factor
            width, color = length * inches, span_color(span, held)
            boxes.append((first, length))
            colors.append(color)
            edges.append(min(EDGE, 72 * width / 10) if span.kind not in WAITS else 0.0)
            if span.kind not in WAITS and width >= room:
                _write_number(axes, str(span.micro_batch), (first + length / 2, row), color)
        axes.broken_barh(
            boxes, _height(row), facecolors=colors, edgecolors="white", linewidths=edges
        )


def stages_by_rank(spans: Sequence[TimelineEvent]) -> dict[int, list[int]]:
    """The stages that each rank holds, both in order."""
    held: dict[int, set[int]] = {}
    for span in spans:
        held.setdefault(span.rank, set()).add(span.stage)
    return {rank: sorted(held[rank]) for rank in sorted(held)}


def extent(spans: Sequence[TimelineEvent]) -> tuple[float, float]:
    """First start and last end; zeros for no spans."""
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    return min(starts, default=0.0), max(ends, default=0.0)


def span_color(span: TimelineEvent, held: dict[int, list[int]]) -> str:
    """Of its kind; the later stages of a rank are lighter."""
    color = COLORS[span.kind]
    most = max(len(stages) for stages in held.values())
    if most == 1 or span.kind in WAITS:
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


def _add_legend(figure: Figure, spans: Sequence[TimelineEvent], height: float) -> None:
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


def _height(row: int) -> tuple[float, float]:
    """Where the bars of a row begin, and how high they are."""
    return row - BAR_HEIGHT / 2, BAR_HEIGHT


def write_trace(events: Sequence[TimelineEvent], path: Path) -> None:
    """Writes Chrome trace events; the same events, in any order, give the same file."""
    temporary = path.with_name(path.name + ".tmp")
    trace = {"traceEvents": trace_events(events), "displayTimeUnit": "ms"}
    temporary.write_text(json.dumps(trace, indent=0, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def trace_events(events: Sequence[TimelineEvent]) -> list[dict[str, Any]]:
    """Names of ranks and stages first, then the spans in order of rank and time, in microseconds.

    A process per rank; in it a thread per stage, and one for waits.
    """
    held = stages_by_rank(events)
    # a number that is no stage's, and the same in every process
    waits = 1 + max((stage for stages in held.values() for stage in stages), default=0)
    start, _ = extent(events)
    named = []
    for rank, stages in held.items():
        named += _metadata(rank, 0, "process", f"rank {rank}", order=rank)
        for stage in stages:
            named += _metadata(rank, stage, "thread", f"stage {stage}", order=stage)
        if any(event.kind in WAITS for event in events if event.rank == rank):
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


def _complete(event: TimelineEvent, *, waits: int, origin: float) -> dict[str, Any]:
    is_wait = event.kind in WAITS
    return {
        # one colour a kind: Perfetto leaves numbers out when it chooses
        "name": f"{KIND_NAMES[event.kind]} {event.micro_batch}",
        "cat": event.kind if is_wait else "compute",
        "ph": "X",
        "pid": event.rank,
        "tid": waits if is_wait else event.stage,
        "ts": round((event.start - origin) * 1e6, 3),
        "dur": round((event.end - event.start) * 1e6, 3),
        "args": {"stage": event.stage, "micro_batch": event.micro_batch, "kind": event.kind},
    }
