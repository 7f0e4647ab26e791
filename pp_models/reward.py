"""Stages of reward models: a decoder whose last stage scores tokens instead of predicting them.

The library's sequence classifiers with one label: any of its decoders with a linear layer `score`
in the place of the output layer. They start from a language model, whose output layer is left
out and whose `score` is new, or from such a classifier.

Shapes: B rows, T tokens, H hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from pp_models.base import StageModel
from pp_models.causal_lm import Batch, CausalLMStage
from pp_models.discover import ModelPaths, plan_of
from register import train_model_register
from stageline.errors import UserError
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
            model.config.pad_token_id = model.whole.config.pad_token_id = pad_token_id
        return model, processor, pad_token_id


def _run_scores(whole: PreTrainedModel, batch: Batch) -> object:
    return whole.score(whole.base_model(**batch, use_cache=False).last_hidden_state)


def has_scores(config: PretrainedConfig) -> bool:
    """Whether a configuration is of a sequence classifier."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def _with_one_score(config: PretrainedConfig, is_classifier: bool) -> PretrainedConfig:
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"--train-model reward came with a {config.model_type} model, of which the library "
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


@train_model_register("reward")
def reward(
    *,
    attn_implementation: str | None = None,
    output_router_logits: bool | None = None,
    router_aux_loss_coef: float | None = None,
    **kwargs: object,
) -> tuple[StageModel, object, int]:
    """A reward model on any decoder of transformers: scores in the place of logits.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
        output_router_logits: train the load-balancing loss of a mixture of experts too; default:
            what config.json says under this name.
        router_aux_loss_coef: weight of that loss; default: what config.json says.
    """
    return RewardStage.build(
        attn_implementation=attn_implementation,
        output_router_logits=output_router_logits,
        router_aux_loss_coef=router_aux_loss_coef,
        **kwargs,
    )


reward.gives_scores = True  # a loss that predicts tokens is refused early
