"""Figures of likelihoods: right choices by sum and by length, perplexities of texts and answers."""

import functools
import importlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import regex  # transformers brings it

from stageline.errors import UserError

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


def usage_of(predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over predictions that know their usage; empty where none does.

    Returns:
        num_answers, prompt_tokens, completion_tokens, and cost where prices were given.
    """
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


def format_usage(figures: dict[str, Any]) -> str:
    """One line."""
    line = (
        f"{figures['num_answers']} answers: {figures['prompt_tokens']} tokens in prompts, "
        f"{figures['completion_tokens']} in answers"
    )
    if "cost" in figures:
        line += f", {figures['cost']:.6g} for {figures['num_priced']} of them"
    return line


# ROUGE (Lin 2004) by `rouge-score`, BLEU (Papineni et al. 2002) by `sacrebleu` (Post 2018, arXiv
# 1804.08771). Both know words as what lies between spaces; Chinese, Japanese and Thai, which set
# none, are taken character by character.

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# scripts without spaces: Thai, CJK punctuation, kana, Han (with extensions), full-width forms
_UNSPACED = "฀-๿　-〿぀-ヿ㐀-䶿一-鿿豈-﫿＀-￯"
_UNSPACED += "\U00020000-\U0003ffff"
_WORDS = regex.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")  # not re: it cuts Hindi at its vowels


def words(text: str) -> list[str]:
    """Words in lower case; of a script without spaces each character."""
    return _WORDS.findall(unicodedata.normalize("NFC", text.lower()))


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-1, -2 and -L against the reference that fits best, each in [0, 1].

    Raises:
        UserError: rouge-score is not installed.
    """
    scored = [_scorer().score(reference, text) for reference in references]
    return {name: max(scores[name].fmeasure for scores in scored) for name in ROUGE_TYPES}


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU-4 of a corpus, in [0, 1]; a text may have several references.

    Raises:
        UserError: sacrebleu is not installed.
    """
    if not texts:
        return 0.0
    most = max(len(own) for own in references)
    # as many streams as the text with the most references has; what is missing is None
    streams = [[own[i] if i < len(own) else None for own in references] for i in range(most)]
    tokenize = _tokenizer_of(text for own in references for text in own)
    if tokenize == "zh":
        texts = [_spaced(text) for text in texts]
        streams = [[text and _spaced(text) for text in stream] for stream in streams]
    return _package("sacrebleu").corpus_bleu(list(texts), streams, tokenize=tokenize).score / 100


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """BLEU-4 of one text, smoothed (Lin and Och 2004) because short texts lack 4-grams."""
    tokenize, references = _tokenizer_of(references), list(references)
    if tokenize == "zh":
        text, references = _spaced(text), list(map(_spaced, references))
    return _package("sacrebleu").sentence_bleu(text, references, tokenize=tokenize).score / 100


def _spaced(text: str) -> str:
    """With spaces around what sets none: the tokenizer "zh" does so for Chinese alone."""
    return re.sub(f"([{_UNSPACED}])", r" \1 ", text)


def _tokenizer_of(references: Iterable[str]) -> str:
    return "zh" if any(re.search(f"[{_UNSPACED}]", text) for text in references) else "13a"


@functools.cache
def _scorer() -> Any:
    scorer = _package("rouge_score.rouge_scorer", name="rouge-score")
    return scorer.RougeScorer(list(ROUGE_TYPES), tokenizer=SimpleNamespace(tokenize=words))


def _package(module: str, *, name: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = name or module
        raise UserError(
            f"the metric needs the package {name}, which cannot be imported ({error}). It counts "
            f"the overlap of texts: bash scripts/setup.sh text-metrics (or pip install {name}), "
            "or use `metric` exact_match or contains."
        ) from error
