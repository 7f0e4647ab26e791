"""Draw curves and bars: losses of runs, the timeline of a step, lengths in a corpus."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from stageline.pipeline.recorder import (
    KIND_NAMES,
    TRANSFER,
    WAIT,
    WAITS,
    TimelineEvent,
    bubble,
    extent,
    stages_by_rank,
)
from stageline.plotting.pictures import save_figure
from stageline.run_records import read_log

# a loss that falls by more than this factor shows its end on a logarithmic axis only
LOG_SCALE_FROM = 30.0


def smooth(values: Sequence[float], *, width: int | None = None) -> list[float]:
    """Return the running mean over `width` (odd) values around each; default: a twentieth of all.

    At the ends the window shrinks on both sides, so that the first and the last value stay.
    """
    count = len(values)
    reach = (width - 1) // 2 if width is not None else count // 40
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for index in range(count):
        side = min(reach, index, count - 1 - index)
        smoothed.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return smoothed


def loss_figure(
    steps: Sequence[dict], evaluations: Sequence[dict], *, title: str | None = None
) -> Figure:
    """Draw the loss of each step, smoothed, and on held-out samples; the learning rate below.

    Further figures of the loss are drawn thinly, on held-out samples as crosses. Steps whose loss
    or gradient was not finite are marked at the foot of the upper picture.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    # the losses
    x, losses = _points(steps, "loss")
    smoothed = smooth(losses)
    if losses and smoothed == losses:  # too few steps to smooth
        label = f"training (last {losses[-1]:.4g})"
        upper.plot(x, losses, color="tab:blue", marker=".", label=label)
    elif losses:
        upper.plot(x, losses, color="tab:blue", alpha=0.35, linewidth=1, label="training")
        label = f"training, smoothed (last {losses[-1]:.4g})"
        upper.plot(x, smoothed, color="tab:blue", label=label)
    x, held_out = _points(evaluations, "loss")
    if held_out:
        best = x[held_out.index(min(held_out))]
        label = f"held out (last {held_out[-1]:.4g}, best {min(held_out):.4g} at step {best})"
        upper.plot(x, held_out, "o-", color="tab:red", markersize=4, label=label)
    losses = losses + held_out
    # its figures
    others: list[float] = []
    names = dict.fromkeys(name for record in steps for name in record.get("loss_figures", ()))
    for index, name in enumerate(names):
        style: dict[str, Any] = {"color": f"C{(index + 4) % 10}"}  # none of the losses' colors
        style |= {"linewidth": 0.8, "markersize": 4}
        (x, y), found = _points(steps, name), _points(evaluations, name)
        upper.plot(x, smooth(y), "-", label=name.replace("_", " "), **style)
        upper.plot(*found, "x", **style)
        others += y + found[1]
    bad = [one["step"] for one in steps if {"loss", "grad_norm"} & set(one.get("non_finite") or ())]
    if bad:
        foot = upper.get_xaxis_transform()  # on any scale
        label = f"not finite ({len(bad)} steps)"
        upper.plot(bad, [0.02] * len(bad), "x", color="black", transform=foot, label=label)
    # a margin or a reward may be 0 or less, and such an axis would not show it
    if losses and min(losses + others) > 0 and max(losses) > LOG_SCALE_FROM * min(losses):
        upper.set_yscale("log")
    upper.set_ylabel("loss")  # by token, by pair or by answer, as the loss is
    if upper.get_legend_handles_labels()[0]:
        upper.legend()
    if title:
        upper.set_title(title, fontsize=10, parse_math=False)
    lower.plot(*_points(steps, "lr"), color="tab:green")
    lower.set_ylabel("learning rate")
    lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    lower.set_xlabel("optimizer step")
    _style(upper, lower)
    return figure


def plot_loss(log_path: Path, png_path: Path, *, has_pdf: bool = True) -> None:
    """Draw a log, named after its folder; of a run with rewards also `reward.png` next to it."""
    steps, evaluations = read_log(log_path)
    title = log_path.resolve().parent.name
    save_figure(loss_figure(steps, evaluations, title=title), png_path, has_pdf=has_pdf)
    if any("reward" in record for record in steps):
        figure = reward_figure(steps, evaluations, title=title)
        save_figure(figure, png_path.with_name("reward.png"), has_pdf=has_pdf)


def runs_figure(logs: Mapping[str, tuple[Sequence[dict], Sequence[dict]]], metric: str) -> Figure:
    """Draw a held-out figure of several runs; the smoothed training figure where one has none.

    Args:
        logs: name of a run -> its steps and its evaluations.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, (steps, evaluations) in logs.items():
        x, y = _points(evaluations, metric)
        if y:
            axes.plot(x, y, "o-", markersize=4, label=name)
        else:
            x, y = _points(steps, metric)
            axes.plot(x, smooth(y), label=f"{name} (training)")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(metric)
    axes.legend(fontsize=8)
    _style(axes)
    return figure


def reward_figure(steps: Sequence[dict], evaluations: Sequence[dict], *, title: str) -> Figure:
    """Draw rewards by part and on held-out prompts; below, signs of a run that does not learn."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    rewards, shares, lengths = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.2, 1])
    parts = [
        name for name in steps[-1] if name.startswith("reward_") and f"{name}_std" in steps[-1]
    ]
    drawn = [(rewards, name) for name in ("reward", *parts)]
    drawn += [(shares, name) for name in ("equal_groups", "cut_answers", "entropy")]
    for axes, name in [*drawn, (lengths, "answer_tokens")]:
        x, y = _points(steps, name)
        axes.plot(x, smooth(y), label=name.replace("_", " "))
    held_out = _points(evaluations, "reward")
    rewards.plot(*held_out, "o-", color="tab:red", label="held out, likeliest")
    rewards.set_title(f"{title}: running means", fontsize=10, parse_math=False)
    lengths.set_xlabel("optimizer step")
    for axes in (rewards, shares, lengths):
        axes.legend(fontsize=8)
    _style(rewards, shares, lengths)
    return figure


def _style(*panels: Axes) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def _points(records: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the records that have a finite value."""
    found = [(record["step"], record.get(name)) for record in records]
    known = [(x, y) for x, y in found if isinstance(y, int | float) and math.isfinite(y)]
    return [x for x, _ in known], [y for _, y in known]


def lengths_figure(histograms: Mapping[str, Sequence[int]], borders: Sequence[int]) -> Figure:
    """Draw how long the segments of a corpus are, its types on top of each other.

    Args:
        histograms: type -> segments [n] between two borders [n + 1], in tokens.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    lefts = [borders[:-1]] * len(histograms)
    counts, names = list(histograms.values()), list(histograms)
    axes.hist(lefts, borders, weights=counts, stacked=True, label=names)
    axes.set(xlabel="tokens of a segment", ylabel="segments", xlim=(0, None))
    if len(histograms) > 1:
        axes.legend(fontsize=7, title="type", title_fontsize=7)
    return figure


# The timeline of a step: a bar a rank, measured above and ideal below, on the same time axis.

COLORS = {"F": "#3b75c4", "B": "#d9822b", "I": "#c9a227", "W": "#3f9a5b"}
COLORS |= {WAIT: "#e3a5ad", TRANSFER: "#7d4fa3"}
IDLE = "#e9ebee"
NARROW = 0.012  # share of the time axis; shorter bars have no number


def timeline_figure(
    measured: Sequence[TimelineEvent], ideal: Sequence[TimelineEvent] | None, *, title: str
) -> Figure:
    """Draw a step, measured above, ideal below, each with its bubble in the heading.

    Args:
        measured: of one step, all ranks.
        ideal: the same passes in the same order with nothing to wait for but each other.
    """
    panels = [("measured", measured)]
    if ideal:
        panels.append(("ideal: the mean time of each pass, no time for transfers", ideal))
    rows = [max(1, len(stages_by_rank(spans))) for _, spans in panels]
    height = 0.9 + sum(0.36 * count + 0.7 for count in rows)
    figure = Figure(figsize=(14.0, height), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
    length = max(end - start for start, end in (extent(spans) for _, spans in panels))
    seconds = EngFormatter("s")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
    for panel, (name, spans) in zip(axes, panels, strict=True):
        start, end = extent(spans)
        held = stages_by_rank(spans)
        for row, rank in enumerate(held):
            place = (row - 0.4, 0.8)
            panel.broken_barh([(0.0, end - start)], place, facecolors=IDLE, lw=0)
            # draw waits first, so that the other spans cover them
            own = [span for span in spans if span.rank == rank]
            own.sort(key=lambda span: span.kind not in WAITS)
            bars = [(span.start - start, span.end - span.start) for span in own]
            colors = []
            for span in own:  # the later stages of a rank are lighter
                later = 0 if span.kind in WAITS else held[rank].index(span.stage)
                colors.append(to_rgba(COLORS[span.kind], 1 - 0.5 * later / len(held[rank])))
            panel.broken_barh(bars, place, facecolors=colors, edgecolors="white", linewidths=0.2)
            for span, (first, width) in zip(own, bars, strict=True):
                if span.kind not in WAITS and width >= NARROW * length:
                    middle = first + width / 2
                    panel.text(middle, row, str(span.micro_batch), ha="center", va="center",
                               fontsize=7, clip_on=True)  # fmt: skip
        labels = [
            f"rank {rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            for rank, stages in held.items()
        ]
        panel.set(xlim=(0, length or 1.0), ylim=(max(len(held), 1) - 0.5, -0.5))
        panel.set_yticks(range(len(held)), labels, fontsize=8)
        panel.xaxis.set_major_formatter(seconds)
        panel.spines[["top", "right", "left"]].set_visible(False)
        heading = f"{name} — bubble {100 * bubble(spans):.1f} %, {seconds(end - start)}"
        panel.set_title(heading, fontsize=9, loc="left")

    present = {span.kind for _, spans in panels for span in spans}
    names = {name: COLORS[kind] for kind, name in KIND_NAMES.items() if kind in present}
    names["idle"] = IDLE
    handles = [Patch(facecolor=color, label=name) for name, color in names.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(names), fontsize=8,
                  frameon=False)  # fmt: skip
    return figure
