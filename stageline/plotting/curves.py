"""Draws curves and bars: the loss of a run from its log, and what a corpus is made of."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from stageline.plotting.pictures import drawable, font_families, save_figure
from stageline.run_records import read_log

# a loss that falls by more than this factor shows its end on a logarithmic axis only
LOG_SCALE_FROM = 30.0


def smooth(values: Sequence[float], *, width: int | None = None) -> list[float]:
    """Running mean over `width` values around each; it does not lag behind.

    At the ends the window shrinks on both sides, so that the first and the last value stay.

    Args:
        width: odd; by default about a twentieth of the values.
    """
    count = len(values)
    reach = (width - 1) // 2 if width is not None else count // 40
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    smoothed = []
    for index in range(count):
        side = min(reach, index, count - 1 - index)
        smoothed.append((sums[index + side + 1] - sums[index - side]) / (2 * side + 1))
    return smoothed


def loss_figure(
    steps: Sequence[dict], evaluations: Sequence[dict], *, title: str | None = None
) -> Figure:
    """Loss of each step, smoothed, and on held-out samples; the learning rate below.

    What the loss tells besides is drawn thinly, on held-out samples as crosses. Steps whose loss or
    gradient was not finite are marked at the foot of the upper picture.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses = _draw_losses(upper, steps)
    losses += _draw_evaluations(upper, evaluations)
    _draw_figures(upper, steps, evaluations)
    _mark_non_finite(upper, steps)
    if losses and min(losses) > 0 and max(losses) > LOG_SCALE_FROM * min(losses):
        upper.set_yscale("log")
    upper.set_ylabel("loss per supervised token")
    if upper.get_legend_handles_labels()[0]:
        upper.legend()
    if title:
        upper.set_title(title, fontsize=10, parse_math=False)
    lower.plot(*_points(steps, "learning_rate"), color="tab:green")
    lower.set_ylabel("learning rate")
    lower.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    lower.set_xlabel("optimizer step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_loss(log_path: Path, png_path: Path, *, has_pdf: bool = True) -> None:
    """Draws the log at `log_path` into `png_path`; the picture is named after the log's folder.

    Of a run whose answers are rewarded also `reward.png` beside it.
    """
    steps, evaluations = read_log(log_path)
    title = log_path.resolve().parent.name
    save_figure(loss_figure(steps, evaluations, title=title), png_path, has_pdf=has_pdf)
    if any("reward" in record for record in steps):
        figure = reward_figure(steps, evaluations, title=title)
        save_figure(figure, png_path.with_name("reward.png"), has_pdf=has_pdf)


def reward_figure(steps: Sequence[dict], evaluations: Sequence[dict], *, title: str) -> Figure:
    """Rewards by part and on held-out prompts; below, what tells that nothing is learnt."""
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
    rewards.plot(
        *_points(evaluations, "reward"), "o-", color="tab:red", label="held out, likeliest"
    )
    rewards.set_title(title, fontsize=10, parse_math=False)
    lengths.set_xlabel("optimizer step")
    for axes in (rewards, shares, lengths):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _points(records: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values, where a record has a finite one."""
    known = [record for record in records if _is_number(record.get(name))]
    return [record["step"] for record in known], [record[name] for record in known]


def _draw_losses(axes: Axes, steps: Sequence[dict]) -> list[float]:
    x, y = _points(steps, "loss")
    if not y:
        return []
    smoothed = smooth(y)
    if smoothed == y:  # too few steps to smooth
        axes.plot(x, y, color="tab:blue", marker=".", label=f"training (last {y[-1]:.4g})")
        return y
    axes.plot(x, y, color="tab:blue", alpha=0.35, linewidth=1, label="training")
    axes.plot(x, smoothed, color="tab:blue", label=f"training, smoothed (last {y[-1]:.4g})")
    return y


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict]) -> list[float]:
    x, y = _points(evaluations, "loss")
    if y:
        best = x[y.index(min(y))]
        label = f"held out (last {y[-1]:.4g}, best {min(y):.4g} at step {best})"
        axes.plot(x, y, "o-", color="tab:red", markersize=4, label=label)
    return y


def _draw_figures(axes: Axes, steps: Sequence[dict], evaluations: Sequence[dict]) -> None:
    names = dict.fromkeys(name for record in steps for name in record.get("loss_figures", ()))
    for index, name in enumerate(names):
        style: dict[str, Any] = {"color": f"C{(index + 4) % 10}"}  # none of the losses' colors
        style |= {"linewidth": 0.8, "markersize": 4}
        x, y = _points(steps, name)
        axes.plot(x, smooth(y), "-", label=name.replace("_", " "), **style)
        axes.plot(*_points(evaluations, name), "x", **style)


def _mark_non_finite(axes: Axes, steps: Sequence[dict]) -> None:
    bad = [record["step"] for record in steps if record.get("non_finite")]
    if bad:
        axes.plot(
            bad,
            [0.02] * len(bad),
            "x",
            color="black",
            transform=axes.get_xaxis_transform(),  # the foot of the picture, whatever the scale
            label=f"not finite ({len(bad)} steps)",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


MOST_TYPES = 20  # with bars of their own; the largest ones
_GREY = "#9aa0a6"


def corpus_figure(
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]],
    *,
    padding: Mapping[str, float],
    tokens: Mapping[str, int],
    title: str = "",
) -> Figure:
    """Three panels: lengths of segments, tokens of each type, padding.

    Args:
        histograms: type -> (borders [n + 1], segments [n]) of lengths in tokens.
        padding: way to fill rows -> share of them that is padding.
        tokens: type -> how many.
    """
    shown = sorted(tokens, key=lambda name: -tokens[name])[:MOST_TYPES]
    height = 3.2 + 0.9 + 0.28 * len(shown)
    figure = Figure(figsize=(8, height), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3.2, height - 3.2], width_ratios=[2, 1])
    _draw_lengths(figure.add_subplot(grid[0, :]), histograms, shown)
    _draw_tokens(figure.add_subplot(grid[1, 0]), tokens, shown)
    _draw_padding(figure.add_subplot(grid[1, 1]), padding)
    if title:
        figure.suptitle(drawable(title), fontsize=10, parse_math=False)
    return figure


def _draw_lengths(
    axes: Axes,
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]],
    shown: Sequence[str],
) -> None:
    """The segments of each type on top of each other; types beyond the largest are one."""
    counts = [histograms[name][1] for name in shown]
    labels = [drawable(name) for name in shown]
    colors = [f"C{place}" for place in range(len(shown))]
    others = [histograms[name][1] for name in histograms if name not in shown]
    if others:
        counts.append([sum(column) for column in zip(*others, strict=True)])
        labels.append("others")
        colors.append(_GREY)
    if counts:
        borders, _ = histograms[shown[0]]
        lefts = [borders[:-1]] * len(counts)
        axes.hist(lefts, borders, weights=counts, stacked=True, color=colors, label=labels)
    axes.set(xlabel="tokens of a segment", ylabel="segments", xlim=(0, None))
    axes.set_title("lengths of segments", fontsize=9)
    if len(histograms) > 1:
        axes.legend(fontsize=7, title="type", title_fontsize=7)


def _draw_tokens(axes: Axes, tokens: Mapping[str, int], shown: Sequence[str]) -> None:
    names = list(reversed(shown))
    places = range(len(names))
    millions = [tokens[name] / 1e6 for name in names]
    axes.barh(places, millions, color="#4c78a8")
    labels = [drawable(name) for name in names]
    axes.set_yticks(list(places), labels, fontsize=8, family=list(font_families()))
    axes.set(xlabel="million tokens")
    axes.set_title("tokens of each type", fontsize=9)


def _draw_padding(axes: Axes, padding: Mapping[str, float]) -> None:
    names = list(reversed(list(padding)))
    bars = axes.barh(range(len(names)), [padding[name] for name in names], color="#e45756")
    axes.bar_label(bars, [f"{padding[name]:.2%}" for name in names], fontsize=8, padding=2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0, max(1e-3, *padding.values()) * 1.35 if padding else 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("padding of rows", fontsize=9)
