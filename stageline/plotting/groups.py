"""Draws the shares of a report: a bar for each group, with its interval, a panel a grouping."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stageline.plotting.text import drawable, font_families

# inches
WIDTH = 7.0
BAR = 0.26
AROUND = 0.75  # of a panel, for its title and axis
MOST_GROUPS = 40  # of a panel; the largest ones

_COLOR, _UNPARSED = "#4c78a8", "#c8ccd0"

Groups = Mapping[str, Mapping[str, Any]]


def plot_groups(report: Mapping[str, Any], path: str | Path) -> None:
    """Writes a picture of all groupings of a report; where it has none, nothing."""
    figure = groups_figure(report)
    if figure is None:
        return
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)


def groups_figure(report: Mapping[str, Any]) -> Figure | None:
    """A panel a grouping: share of right answers, its interval, the unparsed ones behind it."""
    groupings: dict[str, Groups] = dict(report["groupings"])
    if report["groups"] and report["groups"] not in groupings.values():
        groupings = {"group": report["groups"], **groupings}
    if not groupings:
        return None
    panels = [(name, _largest(groups)) for name, groups in groupings.items()]
    heights = [AROUND + BAR * len(groups) for _, groups in panels]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, groups) in zip(axes, panels, strict=True):
        _draw(panel, name, groups, overall=report["score"])
    return figure


def _largest(groups: Groups) -> list[tuple[str, Mapping[str, Any]]]:
    """The groups with most samples, in order of their names, from the top."""
    by_size = sorted(groups.items(), key=lambda item: -item[1]["num_samples"])[:MOST_GROUPS]
    return sorted(by_size, reverse=True)


def _draw(
    axes: Axes,
    name: str,
    groups: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    overall: float | None,
) -> None:
    shares = [share for _, share in groups]
    scores = [share["score"] for share in shares]
    places = range(len(groups))
    axes.barh(places, [share.get("unparsed_share", 0.0) for share in shares], left=scores,
              color=_UNPARSED, label="unparsed")  # fmt: skip
    intervals = [_interval(share) for share in shares]
    lows = [max(0.0, score - low) for score, (low, _) in zip(scores, intervals, strict=True)]
    highs = [max(0.0, high - score) for score, (_, high) in zip(scores, intervals, strict=True)]
    axes.barh(places, scores, xerr=[lows, highs], color=_COLOR, capsize=2,
              error_kw={"elinewidth": 1}, label="right")  # fmt: skip
    if overall is not None:
        axes.axvline(overall, color="#24292f", linewidth=0.8, linestyle="--", label="all")
    labels = [f"{drawable(group)} ({share['num_samples']})" for group, share in groups]
    axes.set_yticks(list(places), labels, fontsize=8, family=list(font_families()))
    axes.set(xlim=(0, 1))
    axes.set_title(f"{name}: share of right answers, 95 % intervals", fontsize=9)
    axes.legend(fontsize=7, loc="lower right")


def _interval(share: Mapping[str, Any]) -> Sequence[float]:
    """That of a share; graded scores have the bootstrap's alone, a single one of them none."""
    return share["interval_95"] or share["bootstrap_95"] or [share["score"]] * 2
