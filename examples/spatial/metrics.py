"""The metrics of the spatial sets: verdicts, options, captions, directions, clocks and angles."""

from collections.abc import Callable, Sequence
from typing import Any

from examples.spatial.answer_text import without_negated
from examples.spatial.answers import (
    is_clock,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)
from metric import Predictions, Samples, answers_of, figures_of, wrong_or_unparsed
from stageline.errors import DataError
from stageline.evaluation.rewards import references, right_choice
from stageline.inference.answer_text import contains_words, normalize


def vsr(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """True or false, yes or no, "not true", or the statement said again; per relation."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        label = sample.get("label")
        told = label if label is not None else references(sample)[0]
        truth = parse_truth(str(told).removesuffix(".0"))
        if truth is None:
            raise DataError(
                f"sample {sample.get('source') or sample.get('id')}: the label is {told!r}. "
                "Use 1 or 0, or true or false."
            )
        said = parse_truth(text, statement=sample.get("caption"), question=sample.get("question"))
        return None if said is None else said == truth

    return figures_of(predictions, samples, judge)


def spatial_mm(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Score the option's letter or text, without options the answer's words; per perspective."""
    return figures_of(predictions, samples, _judge_choice)


def whats_up(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Score the right caption, by its letter or its text; per preposition.

    The controlled subsets also have the share of pairs (left and right of the same two objects) and
    of sets (all four pictures of them) that are right as a whole.
    """
    figures = figures_of(predictions, samples, _judge_choice)
    for kind, size in (("pair", 2), ("set", 4)):
        whole = _whole(samples, figures["per_sample"], key=kind, size=size)
        if whole:
            figures[f"{kind}_accuracy"] = sum(whole) / len(whole)
            figures[f"num_{kind}s"] = len(whole)
    return figures


def _whole(samples: Samples, scores: Sequence[int], *, key: str, size: int) -> list[bool]:
    """Return whether all of each complete pair or set are right."""
    found: dict[str, list[int]] = {}
    for sample, score in zip(samples, scores, strict=True):
        if sample.get(key) is not None:
            found.setdefault(sample[key], []).append(score)
    return [all(members) for members in found.values() if len(members) == size]


def rotate_qa(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Directions and their synonyms, options, clock positions, angles; per task."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        if sample.get("choices"):
            return _judge_choice(text, sample)
        verdicts = [_says_the_same(text, answer, sample) for answer in answers_of(sample)]
        return True if True in verdicts else False if False in verdicts else None

    return figures_of(predictions, samples, judge)


def _judge_choice(text: str, sample: dict[str, Any]) -> bool | None:
    choices, question = sample.get("choices"), sample.get("question")
    if not choices:
        return _judge_words(text, answers_of(sample))
    right, said = (
        right_choice(sample, read=parse_choice),
        parse_choice(text, choices, question=question),
    )
    return None if said is None else said == right


def _judge_words(text: str, answers: Sequence[str]) -> bool | None:
    """Look for the answer's words, not negated, or its directions anywhere in the text."""
    said = without_negated(normalize(text))
    directions = parse_directions(text)
    for answer in answers:
        if contains_words(said, answer) or (directions and directions == parse_directions(answer)):
            return True
    return wrong_or_unparsed(text)


def _says_the_same(text: str, answer: str, sample: dict[str, Any]) -> bool | None:
    """Compare as the sample's task requires, or else by the kind of its answer."""
    task, question = sample.get("task"), sample.get("question")
    read = _READERS.get(task or "") or next(
        (read for kind, read in _READERS.items() if _is(kind, answer)), None
    )
    if read is None:
        return normalize(text) == answer or wrong_or_unparsed(text)
    said = read(text, question=question)
    return None if said in (None, frozenset()) else said == read(answer, question=question)


# task of a rotated picture -> what reads its answers; in the order in which an answer is tried
_READERS: dict[str, Callable[..., Any]] = {
    "clock": parse_clock,
    "direction": parse_directions,
    "angle": parse_angle,
    "yes_no": parse_truth,
}


def _is(kind: str, answer: str) -> bool:
    """Return whether an answer is of a kind; a bare number is an angle, not a clock position."""
    if kind == "clock":
        return is_clock(answer)
    return _READERS[kind](answer) not in (None, frozenset())
