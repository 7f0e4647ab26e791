"""The stage classes, to subclass for a model of one's own (docs/add_a_model.md)."""

from stageline.stages.base import StageModel
from stageline.stages.causal_lm import CausalLMStage, RewardStage
from stageline.stages.vision_language import (
    CrossAttentionStage,
    Gemma3VisionStage,
    VisionLanguageStage,
)
from train_model import class_of_key, stage_class_of

__all__ = [
    "CausalLMStage",
    "CrossAttentionStage",
    "Gemma3VisionStage",
    "RewardStage",
    "StageModel",
    "VisionLanguageStage",
    "class_of_key",
    "stage_class_of",
]
