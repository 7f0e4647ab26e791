"""Kinds of models by the names of the library's classes, and what `peft` calls them."""

from pathlib import Path

from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.model_folder import read_json

CLASSIFIER = "ForSequenceClassification"  # with one label: a reward model
SCORED = "SEQ_CLS"
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", CLASSIFIER: SCORED}


def task_of(model_class: str) -> str | None:
    """What peft calls the kind of model that a class is; None: no kind that it knows."""
    return next((task for end, task in _TASKS.items() if model_class.endswith(end)), None)


def is_scored(adapter: Path) -> bool:
    """Whether an adapter belongs on a model that scores rows instead of predicting tokens."""
    return read_json(adapter / ADAPTER_CONFIG).get("task_type") == SCORED
