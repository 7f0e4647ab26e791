"""Figures of likelihoods: right choices by sum and by length, perplexities of texts and answers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Figures = dict[str, Any]
Records = Sequence[dict[str, Any]]

# how choices of unequal length are compared -> what the sum is divided by
NORMALS: dict[str, Callable[[dict[str, Any]], float]] = {
    "acc": lambda choice: 1.0,
    "acc_norm": lambda choice: len(choice["text"]) or 1.0,
    "acc_bytes": lambda choice: len(choice["text"].encode()) or 1.0,
    "acc_tokens": lambda choice: choice["num_tokens"],
}


def choice_figures(predictions: Records, rights: Sequence[int]) -> dict[str, list[int]]:
    """For each way to compare, whether the likeliest choice of each sample is the right one."""
    found: dict[str, list[int]] = {name: [] for name in NORMALS}
    for prediction, right in zip(predictions, rights, strict=True):
        choices = prediction["choice_scores"]
        for name, size in NORMALS.items():
            scores = [choice["logprob"] / size(choice) for choice in choices]
            found[name].append(int(scores.index(max(scores)) == right))
    return found


def text_figures(predictions: Records) -> Figures:
    """Perplexity by token, word and byte over all texts, and the bits of a byte."""
    total = sum(prediction["logprob"] for prediction in predictions)
    counts = {
        unit: sum(prediction[f"num_{unit}s"] for prediction in predictions)
        for unit in ("token", "word", "byte")
    }
    figures: Figures = {
        f"{unit}_perplexity": _exp(-total / count) if count else None
        for unit, count in counts.items()
    }
    figures["bits_per_byte"] = bits_per_byte(total, counts["byte"])
    return {**figures, **{f"num_{unit}s": count for unit, count in counts.items()}}


def bits_per_byte(logprob: float, num_bytes: int) -> float:
    """What a byte of a text of this log-probability costs, in bits."""
    return -logprob / (max(num_bytes, 1) * math.log(2))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
