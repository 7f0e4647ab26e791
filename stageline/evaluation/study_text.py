"""The figures of a study as Markdown tables, and one sentence that says no more than they do."""

from collections.abc import Mapping, Sequence
from typing import Any

from stageline.evaluation.study import ALL


def study_markdown(figures: Mapping[str, Any], *, title: str, settings: Mapping[str, Any]) -> str:
    """The whole report, from what `study_figures` gave.

    Args:
        settings: name -> value, listed on top.
    """
    parts = [
        f"# {title}",
        "\n".join(f"- {name}: {value}" for name, value in settings.items()),
        "## Held-out accuracy\n\nMean over seeds, in brackets the interval of 95 % over held-out "
        "samples; ± is the standard deviation between seeds. Chance is who guesses. Where all or "
        "none are right, the bootstrap has no width: that is no certainty.",
        _accuracy_table(figures),
        "## Difference\n\nPaired by seed and sample, in points of a hundred. The first interval "
        "is for these runs and other samples, the second for other seeds too.",
        _difference_table(figures),
        *(verdict(name, groups[ALL]) for name, groups in figures["differences"].items()),
        "![accuracy](accuracy.png)",
        "## Runs",
        _runs_table(figures),
        "![loss](loss.png)",
    ]
    return "\n\n".join(parts) + "\n"


def verdict(name: str, difference: Mapping[str, Any]) -> str:
    """Whether the arms differ, as far as the runs can tell."""
    low, high = difference["interval_95_over_seeds"]
    arm, _, baseline = name.partition(" - ")
    num_seeds = len(difference["by_seed"])
    if num_seeds < 3:
        return f"With {num_seeds} of 3 seeds nothing can be said about {arm} against {baseline}."
    if low <= 0 <= high:
        return (
            f"Over these {num_seeds} seeds {arm} and {baseline} cannot be told apart: the "
            "interval over seeds holds 0."
        )
    better, worse = (arm, baseline) if low > 0 else (baseline, arm)
    return (
        f"In these {num_seeds} seeds {better} is ahead of {worse}: the interval over seeds does "
        f"not hold 0. {num_seeds} seeds make a rough interval; more seeds make a firm one."
    )


def _accuracy_table(figures: Mapping[str, Any]) -> str:
    arms = figures["arms"]
    rows = [
        [group, f"{100 * chance:.1f}", *(_accuracy(arms[arm][group]) for arm in arms)]
        for group, chance in figures["chance"].items()
    ]
    return _table(["group", "chance", *arms], rows)


def _difference_table(figures: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            group,
            f"{100 * figure['mean']:+.1f}",
            _points(figure["interval_95_over_samples"]),
            _points(figure["interval_95_over_seeds"]),
            ", ".join(f"{100 * value:+.1f}" for value in figure["by_seed"]),
        ]
        for name, groups in figures["differences"].items()
        for group, figure in groups.items()
    ]
    return _table(["difference", "group", "points", "samples", "and seeds", "by seed"], rows)


def _runs_table(figures: Mapping[str, Any]) -> str:
    runs = figures["runs"]
    names = list(dict.fromkeys(name for run in runs for name in run))
    places = {seed: place for place, seed in enumerate(figures["seeds"])}
    rows = [
        [
            *(str(run.get(name, "")) for name in names),
            f"{100 * figures['arms'][run['arm']][ALL]['by_seed'][places[run['seed']]]:.1f}",
        ]
        for run in runs
    ]
    return _table([*names, "accuracy"], rows)


def _accuracy(figure: Mapping[str, Any]) -> str:
    low, high = figure["interval_95_over_samples"]
    mean = f"{100 * figure['mean']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{mean} ± {100 * figure['spread']:.1f}" if len(figure["by_seed"]) > 1 else mean


def _points(interval: Sequence[float]) -> str:
    return f"[{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
