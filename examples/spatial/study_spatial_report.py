"""Write the report of a study with drawn scenes: report.md, report.json, accuracy.png, loss.png.

Usage: study_spatial_report.py FOLDER, with the runs in FOLDER/ARM/seed-N.

It compares ways of training over several seeds on one held-out set. Two questions are kept apart:
how sure the figures of the runs that were made are (the held-out samples are drawn again), and how
sure they would be of runs with other seeds (the seeds are drawn again too; rough, where there are
few). Views of one scene are not independent samples: where there are several, scenes are drawn.
"""

import datetime
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.spatial.metrics import rotate_qa
from stageline.errors import UserError
from stageline.evaluation.predictions import newest_records
from stageline.evaluation.report import write_report
from stageline.plotting.figures import smooth
from stageline.plotting.pictures import save_figure
from stageline.run_records import read_log
from stageline.tables import markdown_table

COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")
NUM_DRAWS = 2000
ALL = "all"
CONSISTENT = "all views right"


@dataclass(frozen=True)
class Run:
    """The scores of one run.

    Attributes:
        scores: id of a held-out sample -> 0 or 1; of views of scenes, scene -> share of them.
        groups: id -> group of the report, such as its task.
        facts: seconds, steps ...; shown in the table of runs.
        consistent: scene -> 1 where the answers to all its views are right; empty without views.
    """

    arm: str
    seed: int
    scores: Mapping[str, float]
    groups: Mapping[str, str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    consistent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A mean over seeds, with intervals of 95 %.

    Attributes:
        by_seed: the mean of each seed, in order of seeds.
        over_samples: other held-out samples, the same runs.
        over_seeds: other samples and other seeds; None: a single seed tells of no others.
    """

    mean: float
    by_seed: tuple[float, ...]
    over_samples: tuple[float, float]
    over_seeds: tuple[float, float] | None
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
                "the study has no finished run. Start the script of the study "
                "again: it continues where it stopped."
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
        self.shown = [*self.groups, ALL, *([CONSISTENT] if runs[0].consistent else [])]

    def _check(self) -> None:
        for run in self.runs:
            if sorted(run.scores) != self.ids:
                raise UserError(
                    f"{run.arm} with seed {run.seed} was evaluated on other samples than "
                    f"{self.runs[0].arm} with seed {self.runs[0].seed}. Evaluate it "
                    "again: runs are compared sample by sample."
                )
        made = sorted((run.arm, run.seed) for run in self.runs)
        wanted = sorted((arm, seed) for arm in self.arms for seed in self.seeds)
        if made != wanted:
            missing = [f"{arm} {seed}" for arm, seed in wanted if (arm, seed) not in made]
            raise UserError(
                f"runs are missing or doubled: {', '.join(missing) or made}. Start the "
                "script of the study again: it makes one run for each arm and seed, and continues "
                "where it stopped."
            )

    def scores(self, arm: str, group: str = ALL) -> numpy.ndarray:
        """[seeds, samples of the group]."""
        runs = {run.seed: run for run in self.runs if run.arm == arm}
        is_whole = group == CONSISTENT
        found = [runs[seed].consistent if is_whole else runs[seed].scores for seed in self.seeds]
        scores = numpy.array([[of[name] for name in self.ids] for of in found])
        return scores[:, self._rows[ALL if is_whole else group]]

    def accuracy(self, arm: str, group: str = ALL) -> Figure:
        """Return the accuracy of one arm."""
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
        over_seeds=(
            _interval(numpy.take_along_axis(means_DS, seeds_DS, axis=1).mean(axis=1))
            if num_seeds > 1
            else None
        ),
        num_samples=num_samples,
    )


def _interval(values: numpy.ndarray) -> tuple[float, float]:
    low, high = numpy.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def study_figures(study: Study, *, chance: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures as plain data, for report.json.

    Args:
        chance: group -> accuracy of who guesses.
    """
    groups = study.shown
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
    """Return the chance of a group; for all groups, the mean over samples."""
    if group != ALL:
        return chance[group]
    groups = study.runs[0].groups
    return sum(chance[groups[name]] for name in study.ids) / len(study.ids)


def plain(figure: Figure) -> dict[str, Any]:
    """Return a figure as plain data."""
    return {
        "mean": figure.mean,
        "by_seed": list(figure.by_seed),
        "spread": figure.spread,
        "interval_95_over_samples": list(figure.over_samples),
        "interval_95_over_seeds": figure.over_seeds and list(figure.over_seeds),
        "num_samples": figure.num_samples,
    }


def study_markdown(figures: Mapping[str, Any], *, title: str, settings: Mapping[str, Any]) -> str:
    """Write the whole report from the output of `study_figures`.

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
    """Return whether the arms differ, as far as the runs can tell."""
    arm, _, baseline = name.partition(" - ")
    num_seeds = len(difference["by_seed"])
    if num_seeds < 3:
        return f"With {num_seeds} of 3 seeds nothing can be said about {arm} against {baseline}."
    low, high = difference["interval_95_over_seeds"]
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
    return markdown_table([["group", "chance", *arms], *rows])


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
    head = ["difference", "group", "points", "samples", "and seeds", "by seed"]
    return markdown_table([head, *rows], num_texts=2)


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
    return markdown_table([[*names, "accuracy"], *rows])


def _accuracy(figure: Mapping[str, Any]) -> str:
    low, high = figure["interval_95_over_samples"]
    mean = f"{100 * figure['mean']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    return f"{mean} ± {100 * figure['spread']:.1f}" if len(figure["by_seed"]) > 1 else mean


def _points(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "-"
    return f"[{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"


def accuracy_figure(figures: Mapping[str, Any]) -> Picture:
    """Accuracies of the arms; below, where there are several, the differences and what decides.

    Args:
        figures: as `study_figures` gives them.
    """
    groups, num_seeds = list(figures["chance"]), len(figures["seeds"])
    ratios = [4, 3] if figures["differences"] else [4]
    size = (max(7.0, 1.5 + 1.1 * len(groups)), 0.6 + sum(ratios))
    picture = Picture(figsize=size, layout="constrained")
    panels = picture.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    accuracy, *others = panels[:, 0]
    _draw_accuracies(accuracy, figures["arms"], groups, figures["chance"])
    for panel in others:
        _draw_differences(panel, figures["differences"], groups, num_seeds=num_seeds)
    panels[-1, 0].set_xticks(range(len(groups)), [group.replace(", ", "\n") for group in groups])
    for panel in panels[:, 0]:
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=9)
    return picture


def _draw_accuracies(
    axes: Axes,
    arms: Mapping[str, Any],
    groups: Sequence[str],
    chance: Mapping[str, float],
) -> None:
    """Bars with intervals over samples, a dot a seed, a line at chance."""
    width = 0.8 / len(arms)
    for number, (arm, by_group) in enumerate(arms.items()):
        places = _places(number, len(arms), len(groups))
        shown = [by_group[group] for group in groups]
        means = [figure["mean"] for figure in shown]
        axes.bar(places, means, width, color=COLORS[number % len(COLORS)], label=arm)
        _draw_interval(axes, places, shown, "over_samples", linewidth=1.2)
        for place, figure in zip(places, shown, strict=True):
            seeds = figure["by_seed"] if len(figure["by_seed"]) > 1 else []
            axes.plot([place] * len(seeds), seeds, ".", color="black", markersize=4, zorder=3)
    for index, group in enumerate(groups):
        axes.plot([index - 0.45, index + 0.45], [chance[group]] * 2, "--", color="black", lw=1)
    axes.plot([], [], "--", color="black", linewidth=1, label="chance")
    axes.plot([], [], color="black", linewidth=1.2, label="95 % over samples")
    if len(shown[0]["by_seed"]) > 1:
        axes.plot([], [], ".", color="black", markersize=4, label="a seed")
    axes.set(ylim=(0, 1.02), ylabel="held-out accuracy")


def _draw_differences(
    axes: Axes, differences: Mapping[str, Any], groups: Sequence[str], *, num_seeds: int
) -> None:
    """Dots with two intervals: thin over samples, thick over seeds, too, which is what decides."""
    for number, (name, by_group) in enumerate(differences.items()):
        places = _places(number, len(differences), len(groups))
        shown = [by_group[group] for group in groups]
        color = COLORS[(number + 1) % len(COLORS)]
        if num_seeds > 1:
            _draw_interval(axes, places, shown, "over_seeds", linewidth=5, color=color, alpha=0.45)
        _draw_interval(axes, places, shown, "over_samples", linewidth=1.2)
        means = [figure["mean"] for figure in shown]
        axes.plot(places, means, "o", color=color, label=name, zorder=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot([], [], color="black", linewidth=1.2, label="95 % over samples")
    if num_seeds > 1:
        thick = {"color": COLORS[1], "alpha": 0.45, "linewidth": 5}
        axes.plot([], [], label="over seeds too: decides", **thick)
    axes.set(ylabel="difference")


def _places(number: int, count: int, num_groups: int) -> list[float]:
    """Return the places of bar `number` of `count` on the axis, one in each group."""
    return [index + (number - (count - 1) / 2) * 0.8 / count for index in range(num_groups)]


def _draw_interval(
    axes: Axes, places: Sequence[float], shown: Sequence[Mapping[str, Any]], kind: str, **style: Any
) -> None:
    lows, highs = zip(*(figure[f"interval_95_{kind}"] for figure in shown), strict=True)
    axes.vlines(places, lows, highs, **{"color": "black", "zorder": 2, **style})


def losses_figure(logs: Mapping[str, Sequence[Sequence[dict]]]) -> Picture:
    """Next-token losses of all runs that have one: a thin line each, in the colour of its arm.

    Args:
        logs: arm -> training records of each of its runs. A loss of several terms tells its
            next-token loss apart as `token_loss`; that is what arms have in common.
    """
    figure = Picture(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (arm, runs) in enumerate(logs.items()):
        for place, records in enumerate(runs):
            known = [one for one in records if one.get("loss") is not None and "reward" not in one]
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


def by_scene(values: Sequence[float], samples: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """Scene -> what was given for each of its views."""
    views: dict[str, list] = {}
    for value, sample in zip(values, samples, strict=True):
        views.setdefault(sample["contrast_group"], []).append(value)
    return views


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    """Read one record for each held-out sample, from the newest evaluation."""
    return list(newest_records(folder / "evaluation" / "predictions.jsonl").values())


def chance_by_group(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the accuracy of guessing in each group, whose answers are equally frequent."""
    answers: dict[str, set[str]] = {}
    for sample in samples:
        answers.setdefault(sample["group"], set()).add(sample["answer"])
    chance = {group: 1 / len(found) for group, found in answers.items()}
    if "contrast_group" in samples[0]:
        views = by_scene([chance[sample["group"]] for sample in samples], samples)
        chance[CONSISTENT] = float(numpy.mean([math.prod(of) for of in views.values()]))
    return chance


def read_run(folder: Path) -> Run:
    """Read the predictions of one run and compute its scores again."""
    records = read_predictions(folder)
    samples = [record["sample"] for record in records]
    scores = rotate_qa(records, samples)["per_sample"]
    names = [record["id"] for record in records]
    consistent: dict[str, float] = {}
    if "contrast_group" in samples[0]:
        views = by_scene(scores, samples)
        consistent = {scene: float(min(of)) for scene, of in views.items()}
        names = [sample["contrast_group"] for sample in samples]
        scores = [sum(views[scene]) / len(views[scene]) for scene in names]
    steps, _ = read_log(folder / "log.jsonl")
    facts = {
        "steps": steps[-1]["step"],
        "seconds of training": round(sum(step["seconds"] for step in steps)),
    }
    return Run(
        arm=folder.parent.name,
        seed=int(folder.name.removeprefix("seed-")),
        scores=dict(zip(names, scores, strict=True)),
        groups={name: sample["group"] for name, sample in zip(names, samples, strict=True)},
        facts=facts,
        consistent=consistent,
    )


def run_folders(folder: Path) -> list[Path]:
    """Evaluated runs; `sft` first, since it is what others are compared with."""
    found = [path.parents[1] for path in folder.glob("*/seed-*/evaluation/report.json")]
    return sorted(found, key=lambda path: (path.parent.name != "sft", str(path)))


def describe(folders: Sequence[Path]) -> dict[str, Any]:
    """Date, machine and what all runs have in common."""
    texts = [(folder / "config.yaml").read_text(encoding="utf-8") for folder in folders]
    first, *others = (yaml.safe_load(text) for text in texts)
    names = ("dataset", "batch-size", "total-steps", "learning-rate", "num-stages", "device")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {device}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        **{
            name: first[name]
            for name in names
            if name in first and all(other.get(name) == first[name] for other in others)
        },
    }


def main(target: str) -> None:
    folder = Path(target)
    folders = run_folders(folder)
    study = Study([read_run(path) for path in folders])
    chance = chance_by_group([record["sample"] for record in read_predictions(folders[0])])
    figures = study_figures(study, chance=chance)
    logs: dict[str, list[list[dict]]] = {}
    for path in folders:
        logs.setdefault(path.parent.name, []).append(read_log(path / "log.jsonl")[0])
    save_figure(accuracy_figure(figures), folder / "accuracy.png")
    save_figure(losses_figure(logs), folder / "loss.png")
    text = study_markdown(figures, title="Spatial study", settings=describe(folders))
    write_report(figures, folder / "report.json")
    (folder / "report.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"report.md, report.json, accuracy.png and loss.png are in {folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
