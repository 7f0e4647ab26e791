"""What is written of a sample that was scored: plain values that a metric reads again."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from stageline.inference.likelihood import ScoredRow
from stageline.inference.scoring import RowScore, Scores


def as_they_are_whole(
    scores: Scores, owners: Sequence[int]
) -> Iterator[tuple[int, list[RowScore | Exception]]]:
    """(sample, scores of its rows in order) as soon as all rows of a sample are there."""
    own: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        own.setdefault(owner, []).append(number)
    found: dict[int, RowScore | Exception] = {}
    for number, score in scores:
        found[number] = score
        owner = owners[number]
        if all(n in found for n in own[owner]):
            yield owner, [found.pop(n) for n in own[owner]]


def choice_result(
    scores: Sequence[RowScore | Exception], rows: Sequence[ScoredRow], texts: Sequence[str]
) -> dict[str, Any]:
    """The likeliest text, and of each: log-probability, tokens, and whether it is greedy."""
    failed = _failure(scores)
    if failed:
        return failed
    choices = [
        {
            "text": text,
            "logprob": sum(score.logprobs),
            "num_tokens": len(score.logprobs),
            "is_greedy": score.is_greedy,
        }
        for score, text in zip(scores, texts, strict=True)
    ]
    likeliest = max(choices, key=lambda choice: choice["logprob"])
    return {
        "text": likeliest["text"],
        "choice_scores": choices,
        "num_context_tokens": [len(row.input_ids) - row.num_targets for row in rows],
        "first_token_id": rows[0].input_ids[0],
    }


def text_result(scores: Sequence[RowScore | Exception], text: str) -> dict[str, Any]:
    """Log-probability of a text, and its size in tokens, words and bytes."""
    failed = _failure(scores)
    if failed:
        return failed
    return {
        "text": "",
        "logprob": sum(sum(score.logprobs) for score in scores),
        "num_tokens": sum(len(score.logprobs) for score in scores),
        "num_words": len(re.split(r"\s+", text)),  # as lm-evaluation-harness counts them
        "num_bytes": len(text.encode()),
        "num_windows": len(scores),
    }


def _failure(scores: Sequence[RowScore | Exception]) -> dict[str, Any] | None:
    error = next((score for score in scores if isinstance(score, Exception)), None)
    return None if error is None else {"error": f"{type(error).__name__}: {error}"}
