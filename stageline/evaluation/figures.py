"""Figures of likelihoods: right choices by sum and by length, perplexities of texts and answers."""

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import regex  # transformers brings it

from stageline.errors import package

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
    """Return, for each way to compare, whether the likeliest choice of each sample is right."""
    found: dict[str, list[int]] = {name: [] for name in NORMALS}
    for prediction, right in zip(predictions, rights, strict=True):
        choices = prediction["choice_scores"]
        for name, size in NORMALS.items():
            scores = [choice["logprob"] / size(choice) for choice in choices]
            found[name].append(int(scores.index(max(scores)) == right))
    return found


def text_figures(predictions: Records) -> Figures:
    """Return the perplexity by token, word and byte over all texts, and the bits of a byte."""
    total = sum(prediction["logprob"] for prediction in predictions)
    perplexities, counts = {}, {}
    for unit in ("token", "word", "byte"):
        count = sum(prediction[f"num_{unit}s"] for prediction in predictions)
        mean = -total / count if count else 0.0
        perplexity = math.exp(mean) if mean < 700 else math.inf
        perplexities[f"{unit}_perplexity"] = perplexity if count else None
        counts[f"num_{unit}s"] = count
    bits = {"bits_per_byte": bits_per_byte(total, counts["num_bytes"])}
    return {**perplexities, **bits, **counts}


def bits_per_byte(logprob: float, num_bytes: int) -> float:
    """Return the bits of a byte of a text with this log-probability."""
    return -logprob / (max(num_bytes, 1) * math.log(2))


def usage_of(predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up usage: num_answers, prompt_tokens, completion_tokens, and cost if there are prices."""
    known = [item for item in predictions if isinstance(item.get("usage"), dict)]
    if not known:
        return {}
    figures: dict[str, Any] = {"num_answers": len(known)}
    for name in ("prompt_tokens", "completion_tokens"):
        figures[name] = sum(int(item["usage"].get(name) or 0) for item in known)
    costs = [float(item["cost"]) for item in known if item.get("cost") is not None]
    if costs:
        figures["cost"] = sum(costs)
        figures["num_priced"] = len(costs)  # others were asked before prices were given
    return figures


# ROUGE (Lin 2004) by `rouge-score`, BLEU (Papineni et al. 2002) by `sacrebleu` (Post 2018, arXiv
# 1804.08771). Both split words at spaces; Chinese, Japanese and Thai, which write none, are split
# into characters.

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# scripts without spaces: Thai, CJK punctuation, kana, Han (with extensions), full-width forms
_UNSPACED = "฀-๿　-〿぀-ヿ㐀-䶿一-鿿豈-﫿＀-￯"
_UNSPACED += "\U00020000-\U0003ffff"
_WORDS = regex.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")  # not re: it cuts Hindi at its vowels


def words(text: str) -> list[str]:
    """Return words in lower case; of a script without spaces each character."""
    return _WORDS.findall(unicodedata.normalize("NFC", text.lower()))


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """Return the F1 of ROUGE-1, -2 and -L in [0, 1] against the reference that fits best."""
    scored = [_scorer().score(reference, text) for reference in references]
    return {name: max(scores[name].fmeasure for scores in scored) for name in ROUGE_TYPES}


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return BLEU-4 of a corpus, in [0, 1]; a text may have several references."""
    if not texts:
        return 0.0
    most = max(len(own) for own in references)
    # There are as many streams as the most references of a text; missing ones are None.
    streams = [[own[i] if i < len(own) else None for own in references] for i in range(most)]
    tokenize = _tokenizer_of(text for own in references for text in own)
    if tokenize == "zh":
        texts = [_spaced(text) for text in texts]
        streams = [[text and _spaced(text) for text in stream] for stream in streams]
    return _package("sacrebleu").corpus_bleu(list(texts), streams, tokenize=tokenize).score / 100


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """Return BLEU-4 of a text, smoothed (Lin and Och 2004) because short texts lack 4-grams."""
    tokenize, references = _tokenizer_of(references), list(references)
    if tokenize == "zh":
        text, references = _spaced(text), list(map(_spaced, references))
    return _package("sacrebleu").sentence_bleu(text, references, tokenize=tokenize).score / 100


def _spaced(text: str) -> str:
    """Set spaces around what sets none: the tokenizer "zh" does so for Chinese only."""
    return re.sub(f"([{_UNSPACED}])", r" \1 ", text)


def _tokenizer_of(references: Iterable[str]) -> str:
    return "zh" if any(re.search(f"[{_UNSPACED}]", text) for text in references) else "13a"


@functools.cache
def _scorer() -> Any:
    scorer = _package("rouge_score.rouge_scorer", pip="rouge-score")
    return scorer.RougeScorer(list(ROUGE_TYPES), tokenizer=SimpleNamespace(tokenize=words))


_package = functools.partial(
    package, user="the metric", extra="text-metrics", instead="use `metric` exact_match"
)
