"""Draws a study: accuracy of each arm by group, and the losses of all runs. Takes plain figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stageline.plotting.curves import smooth

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")


def plot_accuracy(figures: Mapping[str, Any], path: str | Path) -> None:
    """Bars with intervals over samples, a dot a seed, a line at chance."""
    _save(accuracy_figure(figures), path)


def accuracy_figure(figures: Mapping[str, Any]) -> Figure:
    """A place for each group, a bar for each arm; `figures` as `study_figures` gives them."""
    arms, groups = figures["arms"], list(figures["chance"])
    figure = Figure(figsize=(1.5 + 1.1 * len(groups), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(arms)
    for number, (arm, by_group) in enumerate(arms.items()):
        places = [index + (number - (len(arms) - 1) / 2) * width for index in range(len(groups))]
        means = [by_group[group]["mean"] for group in groups]
        intervals = [by_group[group]["interval_95_over_samples"] for group in groups]
        # a mean may lie outside its percentile interval by rounding
        below = [max(0.0, mean - low) for mean, (low, _) in zip(means, intervals, strict=True)]
        above = [max(0.0, high - mean) for mean, (_, high) in zip(means, intervals, strict=True)]
        color = COLORS[number % len(COLORS)]
        axes.bar(places, means, width, yerr=[below, above], capsize=3, color=color, label=arm)
        for place, group in zip(places, groups, strict=True):
            seeds = by_group[group]["by_seed"]
            axes.plot([place] * len(seeds), seeds, ".", color="black", markersize=4, zorder=3)
    for index, group in enumerate(groups):
        chance = figures["chance"][group]
        axes.plot([index - 0.45, index + 0.45], [chance] * 2, "--", color="black", linewidth=1)
    axes.plot([], [], "--", color="black", linewidth=1, label="chance")
    axes.set_xticks(range(len(groups)), [group.replace(", ", "\n") for group in groups])
    axes.set(ylim=(0, 1.02), ylabel="held-out accuracy")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=len(arms) + 1, frameon=False)
    return figure


def plot_losses(logs: Mapping[str, Sequence[Sequence[dict]]], path: str | Path) -> None:
    """Next-token losses of all runs."""
    _save(losses_figure(logs), path)


def losses_figure(logs: Mapping[str, Sequence[Sequence[dict]]]) -> Figure:
    """A thin line a run, in the colour of its arm.

    Args:
        logs: arm -> training records of each of its runs. A loss of several terms tells its
            next-token loss apart as `token_loss`; that is what arms have in common.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (arm, runs) in enumerate(logs.items()):
        for place, records in enumerate(runs):
            known = [record for record in records if record.get("loss") is not None]
            losses = [record.get("token_loss", record["loss"]) for record in known]
            axes.plot(
                [record["step"] for record in known],
                smooth(losses),
                color=COLORS[number % len(COLORS)],
                linewidth=1,
                label=arm if place == 0 else None,
            )
    axes.set(xlabel="optimizer step", ylabel="next-token loss, smoothed")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    return figure


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=100, format="png")
    temporary.replace(path)
