"""The metric parts: (predictions, samples) -> score, a score per sample, and groups of samples."""

from collections.abc import Sequence
from typing import Any

from register import metric_register


def group_by(samples: Sequence[dict[str, Any]], *fields: str) -> dict[str, list[int]]:
    """Indices of the samples that share a value of a field, by "field=value"."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        for field in fields:
            if sample.get(field) is not None:
                groups.setdefault(f"{field}={sample[field]}", []).append(index)
    return groups


def _figures(hits: list[int], groups: dict[str, list[int]]) -> dict[str, Any]:
    score = sum(hits) / len(hits) if hits else 0.0
    return {"score": score, "per_sample": hits, "groups": groups}


@metric_register("exact_match")
def exact_match(
    predictions: Sequence[dict[str, Any]],
    samples: Sequence[dict[str, Any]],
    *,
    ignore_case: bool = True,
) -> dict[str, Any]:
    """The prediction is the answer, but for spaces around it.

    Args:
        ignore_case: "Yes" is "yes".
    """

    def plain(text: object) -> str:
        stripped = str(text).strip()
        return stripped.casefold() if ignore_case else stripped

    hits = [
        int(plain(prediction["prediction"]) == plain(sample["answer"]))
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    return _figures(hits, group_by(samples, "group"))


@metric_register("contains")
def contains(
    predictions: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The prediction holds the answer somewhere; case does not matter."""
    hits = [
        int(str(sample["answer"]).strip().casefold() in prediction["prediction"].casefold())
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    return _figures(hits, group_by(samples, "group"))
