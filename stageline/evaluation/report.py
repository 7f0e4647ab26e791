"""From scores per sample to a report: shares with 95 % intervals, overall and per group.

And the comparison of two runs over the same samples.
"""

import json
import math
import os
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from stageline.contracts import broken, check_call, shown
from stageline.errors import DataError, UserError
from stageline.evaluation.predictions import newest_records
from stageline.tables import format_table, markdown_table, natural_key

LEVEL = 0.95
DRAWS_AT_ONCE = 2_000_000  # 16 MB
Samples = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap of percentile intervals of a mean (Efron 1979); 0 resamples turn it off.

    Each interval has its own random draws, so that a further group changes no other.
    """

    resamples: int = 10_000
    seed: int = 0

    def interval(
        self,
        scores: Sequence[float],
        *,
        clusters: Sequence[Hashable] | None = None,
        name: str = "",
    ) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean; None without scores or resamples.

        Args:
            clusters: of each score; by default each is its own. Whole clusters are drawn, since
                rows of one picture are not independent, and the mean is the sum of their scores
                over the number of their rows.
            name: of what is measured; another name draws otherwise.
        """
        if not scores or not self.resamples:
            return None
        sums: dict[Hashable, float] = {}
        counts: Counter[Hashable] = Counter()
        for score, cluster in zip(scores, clusters or range(len(scores)), strict=True):
            sums[cluster] = sums.get(cluster, 0.0) + score
            counts[cluster] += 1
        if len(sums) == 1:  # scipy needs more than one cluster
            mean = sum(scores) / len(scores)
            return mean, mean
        from scipy.stats import bootstrap  # imported here: a run that only answers needs no scipy

        found = bootstrap(
            (list(sums.values()), list(counts.values())),
            lambda sums, counts, axis: sums.sum(axis=axis) / counts.sum(axis=axis),
            paired=True,
            vectorized=True,
            n_resamples=self.resamples,
            batch=max(1, DRAWS_AT_ONCE // len(sums)),
            confidence_level=LEVEL,
            method="percentile",
            rng=numpy.random.default_rng([self.seed, zlib.crc32(name.encode())]),
        )
        return float(found.confidence_interval.low), float(found.confidence_interval.high)


def wilson_interval(num_hits: float, count: int) -> tuple[float, float]:
    """Return the interval of a share (Wilson 1927), which stays within 0 and 1."""
    if count == 0:
        return (0.0, 1.0)
    from scipy.stats import binomtest

    found = binomtest(int(num_hits), count).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


Groups = dict[str, list[int]]  # name of a group -> indices of its samples


def collect_groupings(samples: Samples) -> dict[str, Groups]:
    """Return the groupings of all samples: relation, task, ... -> its groups.

    A sample names its own as `groups`, such as {"relation": "left of", "task": "direction"}.
    """
    groupings: dict[str, Groups] = {}
    for index, sample in enumerate(samples):
        for grouping, name in (sample.get("groups") or {}).items():
            if name is not None:
                groups = groupings.setdefault(str(grouping), {})
                groups.setdefault(str(name), []).append(index)
    return groupings


def collect_clusters(samples: Samples) -> list[str]:
    """Return the cluster of each sample, such as its picture; one without is its own."""
    return [
        f"cluster {sample['cluster']}" if sample.get("cluster") is not None else f"sample {index}"
        for index, sample in enumerate(samples)
    ]


_TAKEN = ("score", "per_sample", "groups", "unparsed", "is_graded", "lower_is_better")


def is_graded(figures: Mapping[str, Any]) -> bool:
    """Tell whether scores are grades: the metric says so, or a score is neither 0 nor 1."""
    return bool(figures.get("is_graded")) or any(x not in (0, 1) for x in figures["per_sample"])


def own_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a metric's figures besides scores; its `score` too, where that is not their mean."""
    scores, told = figures["per_sample"], figures.get("score")
    own = {name: value for name, value in figures.items() if name not in _TAKEN}
    if told is not None and len(scores) and abs(told - sum(scores) / len(scores)) > 1e-6:
        own["own_score"] = told
    return own


def check_metric(metric: Callable[..., Any], samples: Samples) -> None:
    """Try a metric part on empty answers, before hours of answering.

    Raises:
        ContractError: it takes other arguments, or gives something else than figures.
        DataError: a sample lacks what the metric compares with.
    """
    predictions = [{"id": str(sample["id"]), "prediction": "", "prompt": ""} for sample in samples]
    check_call("metric", metric, predictions, samples)
    try:
        figures = metric(predictions, samples)
    except DataError:  # a row is wrong, whatever the answer will be
        raise
    except Exception:  # it may need true answers
        return
    per_sample = figures.get("per_sample") if isinstance(figures, dict) else None
    if not isinstance(per_sample, Sized) or len(per_sample) != len(samples):
        what = "" if per_sample is None else f", per_sample: {shown(per_sample)},"
        raise broken(
            "metric",
            metric,
            f"returned {shown(figures)}{what} for {len(samples)} samples",
            why="The score, its intervals and all groups are computed from per_sample, a number "
            "from 0 to 1 for each sample",
            cure="return {'score': ..., 'per_sample': [...], 'groups': {name: indices}}",
        )


def score_answers(
    name: str, metric: Callable[..., dict[str, Any]], predictions: Samples, samples: Samples
) -> tuple[dict[str, float], list[float]]:
    """Return the score of a metric with its 95 % interval, by name, and each answer's own."""
    figures = metric(predictions, samples)
    scores = [float(one) for one in figures["per_sample"]]
    if is_graded(figures):
        interval = Bootstrap().interval(scores, clusters=collect_clusters(samples), name="all")
    else:
        interval = wilson_interval(sum(scores), len(scores))
    low, high = interval or (math.nan, math.nan)
    score = sum(scores) / max(len(scores), 1)
    return {name: score, f"{name}_low": low, f"{name}_high": high}, scores


def make_report(
    figures: dict[str, Any],
    *,
    settings: dict[str, Any],
    samples: Samples | None = None,
    bootstrap: Bootstrap = Bootstrap(),
    about: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the report of a metric's figures.

    Args:
        figures: `score`, `per_sample` (0 or 1 each), `groups` ({name: indices}), `unparsed` (1 for
            an answer that said nothing); more is passed on. With `is_graded`, or with a score
            that is neither 0 nor 1, they have the bootstrap's interval only.
        settings: how the predictions were made.
        samples: their `groups` give further groupings, their `cluster` what is drawn as a whole.
        bootstrap: how the second interval is drawn.
        about: model, checkpoint, data, date: lines for the head of the page.
    """
    scores: Sequence[float] = figures["per_sample"]
    unparsed: Sequence[int] | None = figures.get("unparsed")
    clusters = collect_clusters(samples or [{}] * len(scores))
    has_grades = is_graded(figures)
    # a guess among N choices is right once in N; a grade cannot be guessed
    asked = () if has_grades else samples or ()
    num_choices = [len(one.get("choices") or ()) or one.get("num_choices") for one in asked]

    def share_of(indices: Sequence[int], name: str) -> dict[str, Any]:
        """Return share, intervals and counts of the samples with these indices."""
        own = [scores[index] for index in indices]
        wilson = None if has_grades else wilson_interval(sum(own), len(own))
        drawn = bootstrap.interval(own, clusters=[clusters[i] for i in indices], name=name)
        share: dict[str, Any] = {
            "score": sum(own) / len(own) if own else None,
            "interval_95": None if wilson is None else list(wilson),
            "bootstrap_95": None if drawn is None else list(drawn),
            "num_samples": len(own),
        }
        if unparsed is not None:
            share["num_unparsed"] = sum(unparsed[index] for index in indices)
            share["unparsed_share"] = share["num_unparsed"] / len(own) if own else None
        guessed = [1 / num for index in indices if num_choices and (num := num_choices[index])]
        if own and len(guessed) == len(own):
            share["chance"] = sum(guessed) / len(own)
        return share

    groups = figures.get("groups", {})
    return {
        **share_of(range(len(scores)), "all"),
        "groups": {name: share_of(groups[name], name) for name in sorted(groups, key=natural_key)},
        "groupings": _by_grouping(samples or (), share_of),
        **own_figures(figures),
        "bootstrap": {
            "resamples": bootstrap.resamples,
            "seed": bootstrap.seed,
            "level": LEVEL,
            "num_clusters": len(set(clusters)),
        },
        "settings": settings,
        **({"about": dict(about)} if about else {}),
    }


FiguresOf = Callable[[Sequence[int], str], dict[str, Any]]  # (indices of a group, its name)


def _by_grouping(samples: Samples, figures_of: FiguresOf) -> dict[str, Any]:
    return {
        grouping: {name: figures_of(groups[name], name) for name in sorted(groups, key=natural_key)}
        for grouping, groups in collect_groupings(samples).items()
    }


def write_report(report: dict[str, Any], path: str | Path) -> None:
    """Write report.json; a torn write leaves the old one."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=str)
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _tables(report: dict[str, Any]) -> Iterator[list[list[str]]]:
    """Yield a table for each grouping; the whole set is the last row of each.

    `group` is left out where another grouping has the same groups.
    """
    groupings = dict(report["groupings"])
    if not groupings or (report["groups"] and report["groups"] not in groupings.values()):
        groupings = {"group": report["groups"], **groupings}
    for grouping, groups in groupings.items():
        named = [(name, group) for name, group in groups.items() if name != "all"]
        shares = [*named, ("all", report)]
        guessed = ["chance"] if any("chance" in share for _, share in shares) else []
        rows = [[grouping, "score", *guessed, "95 % interval", "bootstrap", "samples", "unparsed"]]
        for name, share in shares:
            row = [name, "-" if share["score"] is None else f"{share['score']:.4f}"]
            if guessed:
                row.append(f"{share['chance']:.4f}" if "chance" in share else "-")
            row += map(_interval_text, (share["interval_95"], share["bootstrap_95"]))
            rows.append([*row, str(share["num_samples"]), str(share.get("num_unparsed", "-"))])
        yield rows


def _interval_text(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.3f} - {interval[1]:.3f}"


def format_report(report: dict[str, Any]) -> str:
    """Return tables for a terminal: a line a group, the whole set last."""
    return "\n\n".join(map(format_table, _tables(report)))


def format_figures(figures: dict[str, Any]) -> str:
    """Return a metric's further numbers, a line each."""
    own = own_figures(figures)
    numbers = {name: value for name, value in own.items() if isinstance(value, int | float)}
    return "\n".join(f"{name}: {value:.6g}" for name, value in numbers.items())


def report_markdown(report: dict[str, Any]) -> str:
    """Return the same tables in Markdown, with how they came about."""
    how = report["bootstrap"]
    parts = [
        f"# Evaluation with {report['settings'].get('metric', 'a metric')}",
        "\n".join(f"- {name}: {value}" for name, value in report.get("about", {}).items()),
        f"{report['num_samples']} samples. 95 % intervals: Wilson's of a share, and the bootstrap "
        f"percentiles of {how['resamples']} resamples of {how['num_clusters']} clusters "
        f"(seed {how['seed']}).",
    ]
    return "\n\n".join(filter(None, [*parts, *map(markdown_table, _tables(report))])) + "\n"


# fields that must not change in a sample; its place in a file and its groups may
_FIELDS = ("question", "answer", "answers", "caption", "choices", "answer_index", "label")


def check_same_samples(
    records: Mapping[str, dict[str, Any]], samples: Samples, *, path: str | Path
) -> None:
    """Refuse records whose sample of the same id was another one, by a UserError."""
    for sample in samples:
        kept = records.get(str(sample["id"]), {}).get("sample")
        if not isinstance(kept, dict):
            continue
        for field in _FIELDS:
            if field in kept and field in sample and kept[field] != sample[field]:
                then, now = (reprlib.repr(one[field]) for one in (kept, sample))
                raise UserError(
                    f"{path}: the prediction of sample {str(sample['id'])!r} was made for "
                    f"{field} {then}, and the dataset has {now}. Give another `output_dir` (or "
                    "`compare_with`), or the data as it was."
                )


def read_other(path: str | Path, samples: Samples) -> list[dict[str, Any]]:
    """Return the predictions of another run (the last one in the file) for the same samples.

    Raises:
        UserError: it lacks some of the samples, or is of another dataset.
        DataError: a line is damaged.
    """
    records = newest_records(Path(path))
    missing = [str(sample["id"]) for sample in samples if str(sample["id"]) not in records]
    if missing:
        raise UserError(
            f"`compare_with` {path} has no prediction for {len(missing)} of {len(samples)} "
            f"samples, such as {missing[0]!r}. Evaluate the other model on the same "
            "dataset and split, or `limit` both to the same rows."
        )
    check_same_samples(records, samples, path=path)
    return [records[str(sample["id"])] for sample in samples]


def compare(
    scores: Sequence[float],
    other_scores: Sequence[float],
    samples: Samples,
    *,
    bootstrap: Bootstrap = Bootstrap(),
    lower_is_better: bool = False,
) -> dict[str, Any]:
    """Return this run's scores less the other's, over all samples and for each group.

    Samples are paired: the interval is narrower than two intervals side by side suggest.
    `interval_95` is the paired bootstrap's, `p_value` that of the exact sign test over samples on
    which the runs differ (McNemar's, for scores of 0 and 1); samples of one cluster are one there,
    by the sign of their sum.
    """
    differences = [one - other for one, other in zip(scores, other_scores, strict=True)]
    clusters = collect_clusters(samples)

    def figures_of(indices: Sequence[int], name: str) -> dict[str, Any]:
        chosen = [differences[index] for index in indices]
        drawn = bootstrap.interval(chosen, clusters=[clusters[i] for i in indices], name=name)
        sums: dict[str, float] = {}
        for index in indices:
            sums[clusters[index]] = sums.get(clusters[index], 0.0) + differences[index]
        ahead, behind = (sum(sign * one > 1e-9 for one in sums.values()) for sign in (1, -1))
        better, worse = sum(item > 0 for item in chosen), sum(item < 0 for item in chosen)
        if lower_is_better:
            better, worse = worse, better
        return {
            "difference": sum(chosen) / len(chosen) if chosen else None,
            "interval_95": None if drawn is None else list(drawn),
            "num_samples": len(chosen),
            "num_better": better,
            "num_worse": worse,
            "p_value": sign_test(ahead, behind),
        }

    groupings = _by_grouping(samples, figures_of)
    return {**figures_of(range(len(samples)), "all"), "groupings": groupings}


def sign_test(num_better: int, num_worse: int) -> float:
    """Return the two-sided exact p-value of the sign test."""
    if num_better == num_worse:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(num_better, num_better + num_worse).pvalue)


def comparison_table(comparison: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a table of a comparison, all samples last."""
    parts = {
        f"{grouping}: {name}": part
        for grouping, groups in comparison["groupings"].items()
        for name, part in groups.items()
    }
    rows = [["", "difference", "95 % interval", "better", "worse", "p"]]
    for name, part in [*parts.items(), ("all", comparison)]:
        difference = "-" if part["difference"] is None else f"{part['difference']:+.4f}"
        counts = [str(part["num_better"]), str(part["num_worse"])]
        interval = _interval_text(part["interval_95"])
        rows.append([name, difference, interval, *counts, f"{part['p_value']:.4f}"])
    return rows
