"""Stage classes to subclass for your own model (docs/add_a_model.md)."""

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
