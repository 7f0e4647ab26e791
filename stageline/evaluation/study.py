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
