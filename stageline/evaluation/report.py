"""From scores per sample to a report: shares with 95 % intervals, overall and per group."""

import json
import math
import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from stageline.contracts import broken, check_call, shown

# -- percentile bootstrap intervals of a mean (Efron 1979), seeded --------------------------------
# Rows of one picture are no independent samples: where they name a cluster, whole clusters are
# drawn and the mean is the sum of their scores over the number of their rows.

LEVEL = 0.95
DRAWS_AT_ONCE = 2_000_000  # 16 MB


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn.

    Attributes:
        resamples: how many; 0: no intervals.
        seed: of the draw. Each interval draws on its own, so that a further group changes no other.
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
        """The 95 % interval of the mean; None without scores or resamples.

        Args:
            clusters: of each score; by default each is its own.
            name: of what is measured; another name draws otherwise.
        """
        if not scores or not self.resamples:
            return None
        means = self._means(*_by_cluster(scores, clusters), name=name)
        low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def _means(self, sums: numpy.ndarray, counts: numpy.ndarray, *, name: str) -> numpy.ndarray:
        """The mean of each resample.

        Args:
            sums: of the scores of each cluster.
            counts: rows of each cluster.
        """
        draw = numpy.random.default_rng([self.seed, zlib.crc32(name.encode())])
        size = len(sums)
        at_once = max(1, DRAWS_AT_ONCE // size)
        means = []
        for start in range(0, self.resamples, at_once):
            shape = (min(at_once, self.resamples - start), size)
            drawn = draw.integers(0, size, shape)
            means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
        return numpy.concatenate(means)


def _by_cluster(
    scores: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    if clusters is None:
        return numpy.asarray(scores, dtype=numpy.float64), numpy.ones(len(scores))
    totals: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        total = totals.setdefault(cluster, [0.0, 0.0])
        total[0] += score
        total[1] += 1
    table = numpy.asarray(list(totals.values()), dtype=numpy.float64)
    return table[:, 0], table[:, 1]


# -- which samples belong together in a report, and which are no independent draws ----------------

Groups = dict[str, list[int]]  # name of a group -> indices of its samples


def collect_groupings(samples: Sequence[dict[str, Any]]) -> dict[str, Groups]:
    """The groupings of all samples: relation, task, ... -> its groups.

    A sample says its own as `groups`, such as {"relation": "left of", "task": "direction"}; one
    that names none of a grouping is left out of that grouping.
    """
    groupings: dict[str, Groups] = {}
    for index, sample in enumerate(samples):
        for grouping, name in (sample.get("groups") or {}).items():
            if name is not None:
                groups = groupings.setdefault(str(grouping), {})
                groups.setdefault(str(name), []).append(index)
    return groupings


def collect_clusters(samples: Sequence[dict[str, Any]]) -> list[str]:
    """The cluster of each sample, such as its picture; one without is a cluster by itself."""
    return [
        f"cluster {sample['cluster']}" if sample.get("cluster") is not None else f"sample {index}"
        for index, sample in enumerate(samples)
    ]


# -------------------------------------------------------------------------------------------------

Z_95 = 1.959963984540054
_TAKEN = ("score", "per_sample", "groups", "unparsed", "is_graded")


def wilson_interval(num_hits: float, count: int, *, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share (Wilson 1927); it stays within 0 and 1 and is right at both ends."""
    if count == 0:
        return (0.0, 1.0)
    share = num_hits / count
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (max(0.0, center - half), min(1.0, center + half))


def check_metric(metric: Callable[..., Any], samples: Sequence[dict[str, Any]]) -> None:
    """Tries a metric part on empty answers, before hours of answering.

    What fails for another reason than its signature may need what true answers have.

    Raises:
        ContractError: it takes other arguments, or gives something else than figures.
    """
    predictions = [{"id": str(sample["id"]), "prediction": "", "prompt": ""} for sample in samples]
    check_call("metric", metric, predictions, samples)
    try:
        figures = metric(predictions, samples)
    except Exception:  # told with its traceback, should it come again
        return
    per_sample = figures.get("per_sample") if isinstance(figures, dict) else None
    if not isinstance(per_sample, Sized) or len(per_sample) != len(samples):
        what = "" if per_sample is None else f", per_sample: {shown(per_sample)},"
        raise broken(
            "metric",
            metric,
            f"returned {shown(figures)}{what} for {len(samples)} samples",
            why="A dict with per_sample, a number from 0 to 1 for each sample, was expected, "
            "because the score, its intervals and all groups are computed from these",
            cure="return {'score': ..., 'per_sample': [...], 'groups': {name: indices}}",
        )


def make_report(
    figures: dict[str, Any],
    *,
    settings: dict[str, Any],
    samples: Sequence[dict[str, Any]] | None = None,
    bootstrap: Bootstrap | None = None,
) -> dict[str, Any]:
    """The report of a metric's figures.

    Args:
        figures: `score`, `per_sample` (0 or 1 each), `groups` ({name: indices}), `unparsed` (1 for
            an answer that said nothing); more is passed on. With `is_graded` scores lie anywhere
            between 0 and 1, and have the bootstrap's interval alone.
        settings: how the predictions were made.
        samples: their `groups` give further groupings, their `cluster` what is drawn as a whole.
        bootstrap: how the second interval is drawn.
    """
    samples = samples if samples is not None else [{}] * len(figures["per_sample"])
    shares = _Shares(figures, collect_clusters(samples), bootstrap or Bootstrap())
    groupings = {
        grouping: shares.of_groups(groups)
        for grouping, groups in collect_groupings(samples).items()
    }
    others = {name: value for name, value in figures.items() if name not in _TAKEN}
    return {
        **shares.of(range(len(figures["per_sample"])), "all"),
        "groups": shares.of_groups(figures.get("groups", {})),
        "groupings": groupings,
        **others,
        "bootstrap": shares.described(),
        "settings": settings,
    }


class _Shares:
    """Shares of right answers over some of the samples."""

    def __init__(
        self, figures: dict[str, Any], clusters: Sequence[str], bootstrap: Bootstrap
    ) -> None:
        self.scores: Sequence[float] = figures["per_sample"]
        self.unparsed: Sequence[int] | None = figures.get("unparsed")
        self.is_graded = bool(figures.get("is_graded"))
        self.clusters = clusters
        self.bootstrap = bootstrap

    def of(self, indices: Sequence[int], name: str) -> dict[str, Any]:
        """Share, intervals and counts of the samples with these indices."""
        scores = [self.scores[index] for index in indices]
        clusters = [self.clusters[index] for index in indices]
        drawn = self.bootstrap.interval(scores, clusters=clusters, name=name)
        wilson = None if self.is_graded else list(wilson_interval(sum(scores), len(scores)))
        share: dict[str, Any] = {
            "score": sum(scores) / len(scores) if scores else None,
            "interval_95": wilson,
            "bootstrap_95": None if drawn is None else list(drawn),
            "num_samples": len(scores),
        }
        if self.unparsed is not None:
            share["num_unparsed"] = sum(self.unparsed[index] for index in indices)
            share["unparsed_share"] = share["num_unparsed"] / len(scores) if scores else None
        return share

    def of_groups(self, groups: dict[str, list[int]]) -> dict[str, Any]:
        """The same for each group of a grouping."""
        return {name: self.of(indices, name) for name, indices in sorted(groups.items())}

    def described(self) -> dict[str, Any]:
        """How the intervals were drawn."""
        return {
            "resamples": self.bootstrap.resamples,
            "seed": self.bootstrap.seed,
            "level": LEVEL,
            "num_clusters": len(set(self.clusters)),
        }


def write_report(report: dict[str, Any], path: str | Path) -> None:
    """Writes report.json; a torn write leaves the old one."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(
        json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
    )
    os.replace(temporary, path)


def tables(report: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """Name and cells of a table for each grouping; the whole set is the last row of each.

    `group` is left out where another grouping has the same groups.
    """
    groupings = dict(report["groupings"])
    if not groupings or (report["groups"] and report["groups"] not in groupings.values()):
        groupings = {"group": report["groups"], **groupings}
    for grouping, groups in groupings.items():
        rows = [*groups.items(), ("all", report)]
        yield grouping, [_HEAD, *([name, *_cells(share)] for name, share in rows)]


_HEAD = ["", "score", "95 % interval", "bootstrap", "samples", "unparsed"]


def _cells(share: dict[str, Any]) -> list[str]:
    return [
        "-" if share["score"] is None else f"{share['score']:.4f}",
        interval_text(share["interval_95"]),
        interval_text(share["bootstrap_95"]),
        str(share["num_samples"]),
        str(share.get("num_unparsed", "-")),
    ]


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval as it is printed."""
    return "-" if interval is None else f"{interval[0]:.3f} - {interval[1]:.3f}"


def format_report(report: dict[str, Any]) -> str:
    """Tables for a terminal: a line a group, the whole set last."""
    return "\n\n".join(format_table(grouping, cells) for grouping, cells in tables(report))


def format_figures(figures: dict[str, Any]) -> str:
    """A metric's further numbers, a line each; empty where it has none."""
    own = {name: value for name, value in figures.items() if name not in _TAKEN}
    numbers = {name: value for name, value in own.items() if isinstance(value, int | float)}
    return "\n".join(f"{name}: {value:.6g}" for name, value in numbers.items())


def format_table(title: str, cells: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left and the others to the right."""
    cells = [[title, *cells[0][1:]], *cells[1:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    )


def report_markdown(report: dict[str, Any]) -> str:
    """The same tables in Markdown, with how they came about."""
    how = report["bootstrap"]
    parts = [
        f"# Evaluation with {report['settings'].get('metric', 'a metric')}",
        f"{report['num_samples']} samples. 95 % intervals: Wilson's of a share, and the bootstrap "
        f"percentiles of {how['resamples']} resamples of {how['num_clusters']} clusters "
        f"(seed {how['seed']}).",
    ]
    for grouping, cells in tables(report):
        parts.append(markdown_table([[grouping, *cells[0][1:]], *cells[1:]]))
    return "\n\n".join(parts) + "\n"


def markdown_table(cells: Sequence[Sequence[str]]) -> str:
    """A table; bars in texts are escaped."""
    rows = [[text.replace("|", "\\|") for text in row] for row in cells]
    rule = ["---", *["--:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])
