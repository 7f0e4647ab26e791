"""The metric parts: (predictions, samples) -> {"score", "per_sample", "groups"}.

A prediction is {"prediction": text}, a sample what the dataset gave. Confidence intervals are
added by the runner. An answer that says nothing counts as wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

from register import metric_register
from stageline.data.answers import (
    contains_words,
    is_clock,
    normalize,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)

Predictions = Sequence[dict[str, Any]]
Samples = Sequence[dict[str, Any]]


def _score(
    predictions: Predictions, samples: Samples, is_right: Callable[[str, dict[str, Any]], bool]
) -> dict[str, Any]:
    """Counts right answers, over all and for each `group` of the samples."""
    per_sample = [
        int(is_right(str(prediction["prediction"]), sample))
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.get("group") is not None:
            groups.setdefault(str(sample["group"]), []).append(index)
    score = sum(per_sample) / len(per_sample) if per_sample else 0.0
    return {"score": score, "per_sample": per_sample, "groups": groups}


def _answers(sample: dict[str, Any]) -> list[str]:
    """All answers that count as right."""
    answers = sample.get("answers") or [sample["answer"]]
    return [normalize(str(answer)) for answer in answers]


@metric_register("exact_match")
def exact_match(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The answer and nothing else, but for case, spaces and outer punctuation."""
    return _score(predictions, samples, lambda text, sample: normalize(text) in _answers(sample))


@metric_register("contains")
def contains(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The answer stands somewhere in the text, as whole words."""

    def is_right(text: str, sample: dict[str, Any]) -> bool:
        said = normalize(text)
        return any(contains_words(said, answer) for answer in _answers(sample))

    return _score(predictions, samples, is_right)


@metric_register("vsr")
def vsr(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """True or false, yes or no, "not true", or the statement said again; per relation."""

    def is_right(text: str, sample: dict[str, Any]) -> bool:
        label = sample.get("label")
        truth = bool(label) if label is not None else parse_truth(str(sample["answer"]))
        return parse_truth(text, statement=sample.get("caption")) == truth

    return _score(predictions, samples, is_right)


@metric_register("spatial_mm")
def spatial_mm(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The option's letter or text; without options the answer's words; per perspective."""
    return _score(predictions, samples, _is_right_choice)


@metric_register("whats_up")
def whats_up(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The right caption, by its letter or its text; per preposition."""
    return _score(predictions, samples, _is_right_choice)


@metric_register("rotate_qa")
def rotate_qa(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Directions and their synonyms, options, clock positions, angles; per task."""

    def is_right(text: str, sample: dict[str, Any]) -> bool:
        if sample.get("choices"):
            return _is_right_choice(text, sample)
        return any(_says_the_same(text, answer) for answer in _answers(sample))

    return _score(predictions, samples, is_right)


def _is_right_choice(text: str, sample: dict[str, Any]) -> bool:
    choices = sample.get("choices")
    if not choices:
        said = normalize(text)
        return any(
            contains_words(said, answer) or _is_same_direction(said, answer)
            for answer in _answers(sample)
        )
    right = sample.get("answer_index")
    if right is None:
        right = parse_choice(str(sample["answer"]), choices)
    return right is not None and parse_choice(text, choices) == right


def _says_the_same(text: str, answer: str) -> bool:
    """Compares as what the answer is: a clock position, a direction, an angle, or words."""
    if is_clock(answer):
        return parse_clock(text) == parse_clock(answer)
    if parse_directions(answer):
        return _is_same_direction(text, answer)
    angle = parse_angle(answer)
    if angle is not None:
        return parse_angle(text) == angle
    return normalize(text) == normalize(answer)


def _is_same_direction(text: str, answer: str) -> bool:
    directions = parse_directions(answer)
    return bool(directions) and parse_directions(text) == directions
