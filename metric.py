"""The metric parts: (predictions, samples) -> {"score", "per_sample", "groups", "unparsed"}.

A prediction is {"prediction": text}, a sample what the dataset gave. Confidence intervals and the
figures of other groupings are added by the report. An answer that says nothing counts as wrong and
as unparsed. What an answer says follows the rules of docs/metrics.md.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from register import metric_register
from stageline.errors import DataError, UserError
from stageline.evaluation.figures import (
    ROUGE_TYPES,
    bits_per_byte,
    bleu,
    choice_figures,
    rouge,
    sentence_bleu,
    text_figures,
)
from stageline.tasks.answer_text import contains_words, normalize, says_nothing
from stageline.tasks.answers import (
    is_clock,
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
    without_negated,
)
from stageline.tasks.rewards import references, right_choice

Predictions = Sequence[dict[str, Any]]
Samples = Sequence[dict[str, Any]]
# whether a text is right; None: it says nothing
Judge = Callable[[str, dict[str, Any]], bool | None]


def _score(predictions: Predictions, samples: Samples, judge: Judge) -> dict[str, Any]:
    """Counts right answers, over all and for each `group` of the samples."""
    verdicts = [
        judge(str(prediction["prediction"]), sample)
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.get("group") is not None:
            groups.setdefault(str(sample["group"]), []).append(index)
    per_sample = [int(verdict is True) for verdict in verdicts]
    return {
        "score": sum(per_sample) / len(per_sample) if per_sample else 0.0,
        "per_sample": per_sample,
        "groups": groups,
        "unparsed": [int(verdict is None) for verdict in verdicts],
    }


def _answers(sample: dict[str, Any]) -> list[str]:
    """All answers that count as right."""
    return [normalize(answer) for answer in references(sample)]


@metric_register("exact_match")
def exact_match(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The answer and nothing else, but for case, spaces and outer punctuation."""
    return _compared(predictions, samples, lambda said, answer: said == answer)


@metric_register("contains")
def contains(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The answer stands somewhere in the text, as whole words."""
    return _compared(predictions, samples, contains_words)


def _compared(
    predictions: Predictions, samples: Samples, is_said: Callable[[str, str], bool]
) -> dict[str, Any]:
    """Counts normalized texts that say one of the answers."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        said = normalize(text)
        return any(is_said(said, answer) for answer in _answers(sample)) or _wrong(text)

    return _score(predictions, samples, judge)


def _wrong(text: str) -> bool | None:
    """What a text that is not right counts as: false, or unparsed where it says nothing."""
    return None if says_nothing(text) else False


@metric_register("rouge")
def text_rouge(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """ROUGE-L (F1) against the answer; ROUGE-1 and ROUGE-2 beside it."""
    found = [
        rouge(str(prediction["prediction"]), references(sample))
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    means = {name: _mean([scores[name] for scores in found]) for name in ROUGE_TYPES}
    return {**_graded(predictions, samples, [scores["rougeL"] for scores in found]), **means}


@metric_register("bleu")
def text_bleu(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """BLEU-4 of each answer, smoothed; that of the whole set as corpus_bleu."""
    texts = [str(prediction["prediction"]) for prediction in predictions]
    right = [references(sample) for sample in samples]
    each = [sentence_bleu(text, own) for text, own in zip(texts, right, strict=True)]
    return {**_graded(predictions, samples, each), "corpus_bleu": bleu(texts, right)}


@metric_register("text")
def text_overlap(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """ROUGE-L as the score; exact match, ROUGE-1, ROUGE-2 and corpus BLEU beside it."""
    exact = exact_match(predictions, samples)
    texts = [str(prediction["prediction"]) for prediction in predictions]
    corpus_bleu = bleu(texts, [references(sample) for sample in samples])
    return {
        **text_rouge(predictions, samples),
        "exact_match": exact["score"],
        "corpus_bleu": corpus_bleu,
    }


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores) if scores else 0.0


def _graded(predictions: Predictions, samples: Samples, scores: Sequence[float]) -> dict[str, Any]:
    """Figures of scores between 0 and 1, which are no shares of right answers."""
    figures = _score(predictions, samples, lambda text, sample: _wrong(text))
    return {**figures, "score": _mean(scores), "per_sample": list(scores), "is_graded": True}


@metric_register("vsr")
def vsr(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """True or false, yes or no, "not true", or the statement said again; per relation."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        label = sample.get("label")
        told = label if label is not None else references(sample)[0]
        truth = parse_truth(str(told).removesuffix(".0"))
        if truth is None:
            raise DataError(
                f"sample {sample.get('source') or sample.get('id')}: the label is {told!r}. 1 or "
                "0, true or false were expected, because answers are compared with it: correct "
                "the row."
            )
        said = parse_truth(text, statement=sample.get("caption"), question=sample.get("question"))
        return None if said is None else said == truth

    return _score(predictions, samples, judge)


@metric_register("spatial_mm")
def spatial_mm(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The option's letter or text; without options the answer's words; per perspective."""
    return _score(predictions, samples, _judge_choice)


@metric_register("whats_up")
def whats_up(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """The right caption, by its letter or its text; per preposition.

    Of the controlled subsets also the share of pairs (left and right of the same two objects) and
    of sets (all four pictures of them) that are right as a whole.
    """
    figures = _score(predictions, samples, _judge_choice)
    for kind, size in (("pair", 2), ("set", 4)):
        whole = _whole(samples, figures["per_sample"], key=kind, size=size)
        if whole:
            figures[f"{kind}_accuracy"] = sum(whole) / len(whole)
            figures[f"num_{kind}s"] = len(whole)
    return figures


def _whole(samples: Samples, scores: Sequence[int], *, key: str, size: int) -> list[bool]:
    """Whether all of each complete pair or set are right."""
    found: dict[str, list[int]] = {}
    for sample, score in zip(samples, scores, strict=True):
        if sample.get(key) is not None:
            found.setdefault(sample[key], []).append(score)
    return [all(members) for members in found.values() if len(members) == size]


@metric_register("rotate_qa")
def rotate_qa(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Directions and their synonyms, options, clock positions, angles; per task."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        if sample.get("choices"):
            return _judge_choice(text, sample)
        verdicts = [_says_the_same(text, answer, sample) for answer in _answers(sample)]
        return True if True in verdicts else False if False in verdicts else None

    return _score(predictions, samples, judge)


def _judge_choice(text: str, sample: dict[str, Any]) -> bool | None:
    choices, question = sample.get("choices"), sample.get("question")
    if not choices:
        return _judge_words(text, _answers(sample))
    right, said = right_choice(sample), parse_choice(text, choices, question=question)
    return None if said is None else said == right


def _judge_words(text: str, answers: Sequence[str]) -> bool | None:
    """The answer's words somewhere in the text, where nothing denies them, or its directions."""
    said = without_negated(normalize(text))
    directions = parse_directions(text)
    for answer in answers:
        if contains_words(said, answer) or (directions and directions == parse_directions(answer)):
            return True
    return _wrong(text)


def _says_the_same(text: str, answer: str, sample: dict[str, Any]) -> bool | None:
    """Compares as the sample's task says, or else as what the answer is."""
    task, question = sample.get("task"), sample.get("question")
    read = _READERS.get(task or "") or next(
        (read for kind, read in _READERS.items() if _is(kind, answer)), None
    )
    if read is None:
        return normalize(text) == answer or _wrong(text)
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
    """Whether an answer is of a kind; a bare number is an angle rather than a clock position."""
    if kind == "clock":
        return is_clock(answer)
    return _READERS[kind](answer) not in (None, frozenset())


@metric_register("choice_accuracy")
def choice_accuracy(
    predictions: Predictions,
    samples: Samples,
    *,
    by: Literal["acc", "acc_norm", "acc_bytes", "acc_tokens"] = "acc",
) -> dict[str, Any]:
    """Whether the right choice is the likeliest; for --model loglikelihood.

    Args:
        by: which figure is the score: log-probabilities as they are, or divided by characters,
            bytes or tokens of the choice. All four are told.
    """
    _needs(predictions, "choice_scores", "loglikelihood")
    rights = [right_choice(sample) for sample in samples]
    found = choice_figures(predictions, rights)
    verdicts = iter(found[by])
    figures = _score(predictions, samples, lambda text, sample: bool(next(verdicts)))
    return {**figures, **{name: _mean(shares) for name, shares in found.items()}}


@metric_register("answer_likelihood")
def answer_likelihood(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Whether the answer's tokens are the likeliest ones, and their perplexity.

    For --model loglikelihood --model.continuations answer.
    """
    _needs(predictions, "choice_scores", "loglikelihood")
    answers = [prediction["choice_scores"][0] for prediction in predictions]
    verdicts = iter(answer["is_greedy"] for answer in answers)
    figures = _score(predictions, samples, lambda text, sample: bool(next(verdicts)))
    texts = [{**answer, **_text_sizes(answer["text"])} for answer in answers]
    return {**figures, **text_figures(texts)}


@metric_register("perplexity")
def text_perplexity(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Bits per byte of each text; perplexity by word, byte and token over all.

    For --model perplexity. Less is better.
    """
    _needs(predictions, "num_windows", "perplexity")
    each = [bits_per_byte(item["logprob"], item["num_bytes"]) for item in predictions]
    figures = {**_graded(predictions, samples, each), **text_figures(predictions)}
    figures["unparsed"] = [0] * len(each)  # texts were read, not answers
    return {**figures, "lower_is_better": True}


def _text_sizes(text: str) -> dict[str, int]:
    return {"num_words": len(text.split()) or 1, "num_bytes": len(text.encode())}


def _needs(predictions: Predictions, field: str, model: str) -> None:
    if any(field not in prediction for prediction in predictions):
        raise UserError(
            f"the predictions have no {field}. Those of --model {model} were expected, because "
            "likelihoods are compared: choose that --model, or another --metric."
        )
