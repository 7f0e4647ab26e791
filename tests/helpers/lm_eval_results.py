"""Tasks of lm_eval in files, a model of their words, and the results of two models."""

from pathlib import Path
from typing import Any

import pytest

from stageline.data.text.processor import save_processor
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

TASKS = Path(__file__).resolve().parents[1] / "samples" / "lm_eval_tasks"


def save_task_model(folder: Path, family: str = "llama", **fields: int) -> Path:
    """Save a tiny model with the tokenizer of the tasks' words."""
    tokenizer = tiny_tokenizer((TASKS / "commands.jsonl").read_text(encoding="utf-8").splitlines())
    tiny_whole(family, folder, vocab_size=len(tokenizer), noise=0.3, **fields)
    save_processor(tokenizer, folder)
    return folder


def assert_same_results(
    ours: dict, theirs: dict, names: list[str], *, pair: dict[str, float], whole: dict[str, float]
) -> None:
    """The figures, and each answer: texts, log-likelihoods, whether they are greedy.

    Args:
        pair: how close a log-likelihood that comes with a flag must be, for pytest.approx.
        whole: one of a whole text.
    """
    for name in names:
        mine, its = (
            {sample["doc_id"]: sample["resps"] for sample in results["samples"][name]}
            for results in (ours, theirs)
        )
        assert mine.keys() == its.keys()
        for doc, answers in its.items():
            for (found,), (expected,) in zip(mine[doc], answers, strict=True):
                _assert_same(found, expected, pair=pair, whole=whole)
        for figure, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][figure] == pytest.approx(value, rel=1e-5), figure


def _assert_same(found: Any, expected: Any, *, pair: dict, whole: dict) -> None:
    if isinstance(expected, str):
        assert found == expected
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, **whole)
    else:
        assert tuple(found) == (pytest.approx(expected[0], **pair), expected[1])
