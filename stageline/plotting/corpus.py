"""Draws what a corpus is made of: lengths of its segments, padding, tokens of each type."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from stageline.plotting.text import drawable, font_families

MOST_TYPES = 20  # with bars of their own; the largest ones
_GREY = "#9aa0a6"


def plot_corpus(
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]],
    path: str | Path,
    *,
    padding: Mapping[str, float],
    tokens: Mapping[str, int],
    title: str = "",
) -> None:
    """Writes a picture of three panels; who looks at it meanwhile sees an old or a whole one.

    Args:
        histograms: type -> (borders [n + 1], segments [n]) of lengths in tokens.
        padding: way to fill rows -> share of them that is padding.
        tokens: type -> how many.
    """
    path = Path(path)
    figure = corpus_figure(histograms, padding=padding, tokens=tokens, title=title)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def corpus_figure(
    histograms: Mapping[str, tuple[Sequence[float], Sequence[int]]],
    *,
    padding: Mapping[str, float],
    tokens: Mapping[str, int],
    title: str = "",
) -> Figure:
    """The picture of `plot_corpus`."""
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
    below: list[float] | None = None
    others: list[float] | None = None
    for name in [*shown, *(name for name in histograms if name not in shown)]:
        borders, counts = histograms[name]
        below = below or [0.0] * len(counts)
        if name not in shown:
            others = [a + b for a, b in zip(others or [0.0] * len(counts), counts, strict=True)]
            continue
        _bars(axes, borders, counts, below, label=drawable(name))
        below = [a + b for a, b in zip(below, counts, strict=True)]
    if others is not None and below is not None:
        _bars(axes, borders, others, below, label="others", color=_GREY)
    axes.set(xlabel="tokens of a segment", ylabel="segments", xlim=(0, None))
    axes.set_title("lengths of segments", fontsize=9)
    if len(histograms) > 1:
        axes.legend(fontsize=7, title="type", title_fontsize=7)


def _bars(
    axes: Axes,
    borders: Sequence[float],
    counts: Sequence[float],
    below: Sequence[float],
    **style: Any,
) -> None:
    widths = [right - left for left, right in zip(borders[:-1], borders[1:], strict=True)]
    axes.bar(borders[:-1], counts, widths, bottom=below, align="edge", **style)


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
