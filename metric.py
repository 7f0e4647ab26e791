"""Metric components: (predictions, samples) -> {"score", "per_sample", "groups", "unparsed"}.

A prediction is {"prediction": text}, a sample what the dataset gave. Confidence intervals and the
figures of other groupings are added by the report. An answer that says nothing counts as wrong and
as unparsed. What an answer says follows the rules of docs/metrics.md.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from register import metric_register
from stageline.errors import UserError
from stageline.evaluation.figures import (
    ROUGE_TYPES,
    bits_per_byte,
    bleu,
    choice_figures,
    rouge,
    sentence_bleu,
    text_figures,
)
from stageline.evaluation.rewards import references, right_choice
from stageline.inference.answer_text import contains_words, normalize, says_nothing

Predictions = Sequence[dict[str, Any]]
Samples = Sequence[dict[str, Any]]
# True: the text is right; None: it says nothing
Judge = Callable[[str, dict[str, Any]], bool | None]


def figures_of(predictions: Predictions, samples: Samples, judge: Judge) -> dict[str, Any]:
    """Return the shares of right answers, over all samples and for each `group`."""
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


def answers_of(sample: dict[str, Any]) -> list[str]:
    """Return all answers that count as right."""
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
    """Return the figures of normalized texts that say one of the answers."""

    def judge(text: str, sample: dict[str, Any]) -> bool | None:
        said = normalize(text)
        is_right = any(is_said(said, answer) for answer in answers_of(sample))
        return is_right or wrong_or_unparsed(text)

    return figures_of(predictions, samples, judge)


def wrong_or_unparsed(text: str) -> bool | None:
    """Return the verdict on a wrong text: False, or None (unparsed) where it says nothing."""
    return None if says_nothing(text) else False


@metric_register("rouge")
def text_rouge(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """ROUGE-L (F1) against the answer, with ROUGE-1 and ROUGE-2."""
    found = [
        rouge(str(prediction["prediction"]), references(sample))
        for prediction, sample in zip(predictions, samples, strict=True)
    ]
    means = {name: _mean([scores[name] for scores in found]) for name in ROUGE_TYPES}
    return {**_graded(predictions, samples, [scores["rougeL"] for scores in found]), **means}


@metric_register("bleu")
def text_bleu(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Smoothed BLEU-4 of each answer; corpus_bleu is that of the whole set."""
    texts = [str(prediction["prediction"]) for prediction in predictions]
    right = [references(sample) for sample in samples]
    each = [sentence_bleu(text, own) for text, own in zip(texts, right, strict=True)]
    return {**_graded(predictions, samples, each), "corpus_bleu": bleu(texts, right)}


@metric_register("text")
def text_overlap(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """ROUGE-L as the score, with exact match, ROUGE-1, ROUGE-2 and corpus BLEU."""
    exact = exact_match(predictions, samples)["score"]
    texts = [str(prediction["prediction"]) for prediction in predictions]
    overlap = bleu(texts, [references(sample) for sample in samples])
    return {**text_rouge(predictions, samples), "exact_match": exact, "corpus_bleu": overlap}


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores) if scores else 0.0


def _graded(predictions: Predictions, samples: Samples, scores: Sequence[float]) -> dict[str, Any]:
    """Return figures of scores between 0 and 1 that are graded, not right or wrong."""
    figures = figures_of(predictions, samples, lambda text, sample: wrong_or_unparsed(text))
    return {**figures, "score": _mean(scores), "per_sample": list(scores), "is_graded": True}


@metric_register("choice_accuracy")
def choice_accuracy(
    predictions: Predictions,
    samples: Samples,
    *,
    by: Literal["acc", "acc_norm", "acc_bytes", "acc_tokens"] = "acc",
) -> dict[str, Any]:
    """Whether the right choice is the likeliest; for --model loglikelihood.

    Args:
        by: figure that is the score: acc = log-probabilities as they are, acc_norm, acc_bytes,
            acc_tokens = divided by characters, bytes or tokens. All four are reported.
    """
    _needs(predictions, "choice_scores", "loglikelihood")
    rights = [right_choice(sample) for sample in samples]
    found = choice_figures(predictions, rights)
    verdicts = iter(found[by])
    figures = figures_of(predictions, samples, lambda text, sample: bool(next(verdicts)))
    return {**figures, **{name: _mean(shares) for name, shares in found.items()}}


@metric_register("answer_likelihood")
def answer_likelihood(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Whether the answer's tokens are the likeliest ones, and their perplexity.

    For --model loglikelihood --model.continuations answer.
    """
    _needs(predictions, "choice_scores", "loglikelihood")
    answers = [prediction["choice_scores"][0] for prediction in predictions]
    verdicts = iter(answer["is_greedy"] for answer in answers)
    figures = figures_of(predictions, samples, lambda text, sample: bool(next(verdicts)))
    texts = [
        {**one, "num_words": len(one["text"].split()) or 1, "num_bytes": len(one["text"].encode())}
        for one in answers
    ]
    return {**figures, **text_figures(texts)}


@metric_register("perplexity")
def text_perplexity(predictions: Predictions, samples: Samples) -> dict[str, Any]:
    """Bits per byte of each text; perplexity by word, byte and token over all.

    For --model perplexity. Less is better.
    """
    _needs(predictions, "num_windows", "perplexity")
    each = [bits_per_byte(item["logprob"], item["num_bytes"]) for item in predictions]
    figures = {**_graded(predictions, samples, each), **text_figures(predictions)}
    figures["unparsed"] = [0] * len(each)  # texts were scored, not answers
    return {**figures, "lower_is_better": True}


def _needs(predictions: Predictions, field: str, model: str) -> None:
    if any(field not in prediction for prediction in predictions):
        raise UserError(
            f"the predictions have no {field}, which this metric compares. Use --model {model} or "
            "another --metric."
        )
