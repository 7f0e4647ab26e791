"""Compares ways of training over several seeds on one held-out set. Pure numbers.

Two questions are kept apart: how sure the figures of the runs that were made are (the held-out
samples are drawn again), and how sure they would be of runs with other seeds (the seeds are drawn
again too; rough, where there are few).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from stageline.errors import UserError

NUM_DRAWS = 2000
ALL = "all"


@dataclass(frozen=True)
class Run:
    """What one run scored.

    Attributes:
        scores: id of a held-out sample -> 0 or 1.
        groups: id -> group of the report, such as its task.
        facts: seconds, steps ...; shown in the table of runs.
    """

    arm: str
    seed: int
    scores: Mapping[str, float]
    groups: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A mean over seeds, with intervals of 95 %.

    Attributes:
        by_seed: the mean of each seed, in order of seeds.
        over_samples: other held-out samples, the same runs.
        over_seeds: other samples and other seeds.
    """

    mean: float
    by_seed: tuple[float, ...]
    over_samples: tuple[float, float]
    over_seeds: tuple[float, float]
    num_samples: int

    @property
    def spread(self) -> float:
        """Standard deviation between seeds; 0 for a single one."""
        return float(numpy.std(self.by_seed, ddof=1)) if len(self.by_seed) > 1 else 0.0


class Study:
    """All runs of a study; refuses runs that cannot be compared.

    Raises:
        UserError: there is no run, seeds of an arm are missing, or held-out samples differ.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise UserError(
                "the study has no finished run. At least one was expected, because runs are what "
                "is compared: start scripts/study_spatial.sh again, it goes on where it was."
            )
        self.runs = list(runs)
        self.arms = list(dict.fromkeys(run.arm for run in runs))
        self.seeds = sorted({run.seed for run in runs})
        self.ids = sorted(runs[0].scores)
        self._check()
        groups = runs[0].groups
        self.groups = sorted({groups[name] for name in self.ids})
        self._rows = {
            group: numpy.array([groups[name] == group for name in self.ids])
            for group in self.groups
        }
        self._rows[ALL] = numpy.ones(len(self.ids), dtype=bool)

    def _check(self) -> None:
        for run in self.runs:
            if sorted(run.scores) != self.ids:
                raise UserError(
                    f"{run.arm} with seed {run.seed} was evaluated on other samples than "
                    f"{self.runs[0].arm} with seed {self.runs[0].seed}. The same ones were "
                    "expected, because runs are compared sample by sample: evaluate it again."
                )
        made = sorted((run.arm, run.seed) for run in self.runs)
        wanted = sorted((arm, seed) for arm in self.arms for seed in self.seeds)
        if made != wanted:
            missing = [f"{arm} {seed}" for arm, seed in wanted if (arm, seed) not in made]
            raise UserError(
                f"runs are missing or doubled: {', '.join(missing) or made}. One of each arm and "
                "seed was expected, because arms are compared seed by seed: start "
                "scripts/study_spatial.sh again, it goes on where it was."
            )

    def scores(self, arm: str, group: str = ALL) -> numpy.ndarray:
        """[seeds, samples of the group]."""
        runs = {run.seed: run for run in self.runs if run.arm == arm}
        whole = numpy.array([[runs[seed].scores[name] for name in self.ids] for seed in self.seeds])
        return whole[:, self._rows[group]]

    def accuracy(self, arm: str, group: str = ALL) -> Figure:
        """Of one arm."""
        return bootstrap(self.scores(arm, group))

    def difference(self, arm: str, other: str, group: str = ALL) -> Figure:
        """`other` less `arm`, paired: the same seed and the same sample."""
        return bootstrap(self.scores(other, group) - self.scores(arm, group))


def bootstrap(scores_SN: numpy.ndarray, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> Figure:
    """Mean over seeds (S) and samples (N) with percentile intervals; the same each time."""
    random = numpy.random.default_rng(seed)
    num_seeds, num_samples = scores_SN.shape
    # how often each sample is drawn, [draws, N]
    counts_DN = random.multinomial(num_samples, [1 / num_samples] * num_samples, size=num_draws)
    means_DS = counts_DN @ scores_SN.T / num_samples
    seeds_DS = random.integers(num_seeds, size=(num_draws, num_seeds))
    return Figure(
        mean=float(scores_SN.mean()),
        by_seed=tuple(float(value) for value in scores_SN.mean(axis=1)),
        over_samples=_interval(means_DS.mean(axis=1)),
        over_seeds=_interval(numpy.take_along_axis(means_DS, seeds_DS, axis=1).mean(axis=1)),
        num_samples=num_samples,
    )


def _interval(values: numpy.ndarray) -> tuple[float, float]:
    low, high = numpy.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def study_figures(study: Study, *, chance: Mapping[str, float]) -> dict[str, Any]:
    """All figures as plain data, for report.json.

    Args:
        chance: group -> accuracy of who guesses.
    """
    groups = [*study.groups, ALL]
    baseline, *others = study.arms
    return {
        "seeds": study.seeds,
        "chance": {group: chance_of(study, chance, group) for group in groups},
        "arms": {
            arm: {group: plain(study.accuracy(arm, group)) for group in groups}
            for arm in study.arms
        },
        "differences": {
            f"{other} - {baseline}": {
                group: plain(study.difference(baseline, other, group)) for group in groups
            }
            for other in others
        },
        "runs": [{"arm": run.arm, "seed": run.seed, **run.facts} for run in study.runs],
    }


def chance_of(study: Study, chance: Mapping[str, float], group: str) -> float:
    """Of a group; of all, the mean over samples."""
    if group != ALL:
        return chance[group]
    groups = study.runs[0].groups
    return sum(chance[groups[name]] for name in study.ids) / len(study.ids)


def plain(figure: Figure) -> dict[str, Any]:
    """A figure as data."""
    return {
        "mean": figure.mean,
        "by_seed": list(figure.by_seed),
        "spread": figure.spread,
        "interval_95_over_samples": list(figure.over_samples),
        "interval_95_over_seeds": list(figure.over_seeds),
        "num_samples": figure.num_samples,
    }


# -- the figures of a study as Markdown tables, and one sentence that says no more than they do ---


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
