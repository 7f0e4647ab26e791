"""The train_model parts: stage models and the functions that build and fill one stage.

`base.py` has the contract, `causal_lm.py` every decoder, `vision_language.py` every model with a
vision tower, `gemma3_vision.py` Gemma3, `cross_attention.py` those whose layers attend to images
(Mllama), `reward.py` reward models. A new architecture is a subclass: see docs/add_a_model.md.
"""

from pp_models.base import StageModel
from pp_models.causal_lm import CausalLMStage
from pp_models.cross_attention import CrossAttentionStage
from pp_models.gemma3_vision import Gemma3VisionStage
from pp_models.reward import RewardStage
from pp_models.vision_language import VisionLanguageStage

__all__ = [
    "CausalLMStage",
    "CrossAttentionStage",
    "Gemma3VisionStage",
    "RewardStage",
    "StageModel",
    "VisionLanguageStage",
]
