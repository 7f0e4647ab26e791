"""Two runs over the same samples: the difference of their scores, with paired intervals.

Pairing takes out what makes samples hard for both, so the interval is narrower than two intervals
side by side suggest.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline.errors import UserError
from stageline.evaluation.predictions import newest_records
from stageline.evaluation.report import (
    Bootstrap,
    collect_clusters,
    collect_groupings,
    format_table,
    interval_text,
    markdown_table,
)

# -- whether predictions were made for the samples that they are to be scored on ------------------

# what makes a sample the question that it is; its place in a file or its groups may change
_FIELDS = ("question", "answer", "answers", "caption", "choices", "answer_index", "label")


def check_same_samples(
    records: Mapping[str, dict[str, Any]], samples: Sequence[dict[str, Any]], *, path: str | Path
) -> None:
    """Refuses records whose sample of the same id was another one.

    Raises:
        UserError: names the sample, and what it was.
    """
    for sample in samples:
        kept = records.get(str(sample["id"]), {}).get("sample")
        if not isinstance(kept, dict):
            continue
        for field in _FIELDS:
            if field in kept and field in sample and kept[field] != sample[field]:
                raise UserError(
                    f"{path}: the prediction of sample {str(sample['id'])!r} was made for "
                    f"{field} {_short(kept[field])}, and the dataset has {_short(sample[field])}. "
                    "Predictions of the same data were expected, because others can't be scored "
                    "with it: give another `output_dir` (or `compare_with`), or the data as it was."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -------------------------------------------------------------------------------------------------


def read_other(path: str | Path, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The predictions of another run for the same samples, in their order.

    Where the file holds several runs, the one of the last line counts.

    Raises:
        UserError: it lacks some of the samples, or is of another dataset.
        DataError: a line is damaged.
    """
    records = newest_records(Path(path))
    missing = [str(sample["id"]) for sample in samples if str(sample["id"]) not in records]
    if missing:
        raise UserError(
            f"`compare_with` {path}: {len(missing)} of {len(samples)} samples have no prediction "
            f"there, {missing[0]!r} among them. All were expected, because runs are compared "
            "sample by sample: evaluate the other model on the same dataset and split, or `limit` "
            "both to the same rows."
        )
    check_same_samples(records, samples, path=path)
    return [records[str(sample["id"])] for sample in samples]


def compare(
    scores: Sequence[float],
    other_scores: Sequence[float],
    samples: Sequence[dict[str, Any]],
    *,
    bootstrap: Bootstrap | None = None,
) -> dict[str, Any]:
    """This run's scores less the other's, over all samples and for each group.

    `interval_95` is the paired bootstrap's, `p_value` that of the exact sign test over samples on
    which they differ (McNemar's, for scores of 0 and 1).
    """
    bootstrap = bootstrap or Bootstrap()
    differences = [one - other for one, other in zip(scores, other_scores, strict=True)]
    clusters = collect_clusters(samples)

    def over(indices: Sequence[int], name: str) -> dict[str, Any]:
        chosen = [differences[index] for index in indices]
        drawn = bootstrap.interval(chosen, clusters=[clusters[i] for i in indices], name=name)
        better, worse = sum(item > 0 for item in chosen), sum(item < 0 for item in chosen)
        return {
            "difference": sum(chosen) / len(chosen) if chosen else None,
            "interval_95": None if drawn is None else list(drawn),
            "num_samples": len(chosen),
            "num_better": better,
            "num_worse": worse,
            "p_value": sign_test(better, worse),
        }

    groupings = {
        grouping: {name: over(rows, name) for name, rows in sorted(groups.items())}
        for grouping, groups in collect_groupings(samples).items()
    }
    return {**over(range(len(samples)), "all"), "groupings": groupings}


def sign_test(num_better: int, num_worse: int) -> float:
    """How likely a split at least this uneven is where both are equally good; two-sided, exact."""
    count, few = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(count, k) for k in range(few + 1))
    return float(min(1, 2 * tail / 2**count))


def format_comparison(comparison: dict[str, Any]) -> str:
    """A table for a terminal."""
    return format_table("difference", _cells(comparison))


def comparison_markdown(comparison: dict[str, Any]) -> str:
    """The same in Markdown."""
    return f"## Compared with {comparison['with']}\n\n{markdown_table(_cells(comparison))}\n"


def _cells(comparison: dict[str, Any]) -> list[list[str]]:
    rows = [
        (f"{grouping}: {name}", part)
        for grouping, groups in comparison["groupings"].items()
        for name, part in groups.items()
    ]
    head = ["", "difference", "95 % interval", "better", "worse", "p"]
    return [head, *([name, *_figures(part)] for name, part in [*rows, ("all", comparison)])]


def _figures(part: dict[str, Any]) -> list[str]:
    return [
        "-" if part["difference"] is None else f"{part['difference']:+.4f}",
        interval_text(part["interval_95"]),
        str(part["num_better"]),
        str(part["num_worse"]),
        f"{part['p_value']:.4f}",
    ]
