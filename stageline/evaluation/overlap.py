"""How much of a text stands in another: ROUGE and BLEU, of kept libraries, for any script.

ROUGE (Lin 2004) by `rouge-score`, BLEU (Papineni et al. 2002) by `sacrebleu` (Post 2018, arXiv
1804.08771). Both know words as what lies between spaces; Chinese, Japanese and Thai, which set
none, are taken character by character.
"""

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from stageline.errors import UserError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")
# scripts without spaces: Thai, CJK punctuation, kana, Han (with extensions), full-width forms
_UNSPACED = "฀-๿　-〿぀-ヿ㐀-䶿一-鿿豈-﫿＀-￯"
_UNSPACED += "\U00020000-\U0003ffff"
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """Words in lower case; of a script without spaces each character."""
    return _WORDS.findall(text.lower())


class _Words:
    """What rouge-score asks for."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


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
    unspaced = any(re.search(f"[{_UNSPACED}]", text) for own in references for text in own)
    found = _package("sacrebleu").corpus_bleu(
        list(texts), streams, tokenize="zh" if unspaced else "13a"
    )
    return found.score / 100


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """BLEU-4 of one text, smoothed (Lin and Och 2004) because short texts lack 4-grams."""
    unspaced = any(re.search(f"[{_UNSPACED}]", reference) for reference in references)
    sacrebleu = _package("sacrebleu")
    made = sacrebleu.sentence_bleu(text, list(references), tokenize="zh" if unspaced else "13a")
    return made.score / 100


@functools.cache
def _scorer() -> Any:
    scorer = _package("rouge_score.rouge_scorer", name="rouge-score")
    return scorer.RougeScorer(list(ROUGE_TYPES), tokenizer=_Words())


def _package(module: str, *, name: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = name or module
        raise UserError(
            f"the metric needs the package {name}, which cannot be imported ({error}). It counts "
            f"the overlap of texts: pip install {name}, or use --metric exact_match or contains."
        ) from error
