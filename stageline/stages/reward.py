"""Stages of reward models: a decoder whose last stage scores tokens instead of predicting them.

The library's sequence classifiers with one label: any of its decoders with a linear layer `score`
in the place of the output layer. They start from a language model, whose output layer is left
out and whose `score` is new, or from such a classifier.

Shapes: B rows, T tokens, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from stageline.errors import UserError
from stageline.stages.base import StageModel
from stageline.stages.causal_lm import CausalLMStage
from stageline.stages.discover import ModelPaths, plan_of
from stageline.stages.split_plan import SplitPlan

SCORE = "score"
CLASSIFIER = "ForSequenceClassification"


class RewardStage(CausalLMStage):
    """A stage of a reward model; the last one gives scores [B, T, 1], one for each token.

    A reward is the score at the last token of a row; the loss_fn part knows where that is.
    """

    auto_class = AutoModelForSequenceClassification
    is_tied = False
    gives_scores = True
    runs_head = False  # the library's own would pick the last token by its id
    # of a language model; older folders of gpt_neox have the second name
    unused_names = ("lm_head.", "embed_out.")

    def __init__(self, config: PretrainedConfig, **stage_kwargs: Any) -> None:
        is_classifier = has_scores(config)
        super().__init__(_with_one_score(config, is_classifier), **stage_kwargs)
        if not is_classifier:
            self.fresh_names = frozenset({f"{SCORE}.weight"})

    def find_paths(self, whole: PreTrainedModel) -> ModelPaths:
        if not isinstance(getattr(whole, SCORE, None), torch.nn.Linear):
            raise UserError(
                f"{type(whole).__name__} has no linear layer {SCORE!r}. One was expected behind "
                "the decoder, as the library's classifiers of decoders have it: choose a decoder "
                "of which it has one."
            )
        return replace(super().find_paths(whole), head=SCORE, behind=())

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        return plan_of(whole, _run_scores, kind="scores", sizes=self.sizes)

    def finish(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        return self.whole.score(hidden_BTH)

    @classmethod
    def build(cls, **options: Any) -> tuple[StageModel, object, int]:
        model, processor, pad_token_id = super().build(**options)
        if processor is not None:
            # by it the library finds the end of a row when the saved folder is used
            assert model.whole is not None  # it is a transformers model
            model.config.pad_token_id = model.whole.config.pad_token_id = pad_token_id
        return model, processor, pad_token_id


def _run_scores(whole: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> object:
    hidden = whole.base_model(**batch, use_cache=False).last_hidden_state
    return whole.get_submodule(SCORE)(hidden)


def has_scores(config: PretrainedConfig) -> bool:
    """Whether a configuration is of a sequence classifier."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def _with_one_score(config: PretrainedConfig, is_classifier: bool) -> PretrainedConfig:
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"`train_model` reward came with a {config.model_type} model, of which the library "
            "has no sequence classifier. One was expected, because a reward model is saved as one: "
            "choose another architecture."
        )
    if is_classifier and config.num_labels != 1:
        raise UserError(
            f"the model has {config.num_labels} labels, a reward model with one was expected: a "
            "reward is one number. Start from a language model, or from a classifier with "
            "num_labels 1."
        )
    config.num_labels = 1
    return config
