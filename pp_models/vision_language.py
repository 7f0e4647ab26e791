"""Stages of vision-language models: tower and projector on stage 0, decoder layers on all.

Stage 0 scatters the image features into the embeddings, with the model's own code. Later stages
get hidden states, and rebuild masks and positions from the integers of the micro-batch.
"""

import torch
from transformers import AutoModelForImageTextToText

from pp_models.base import StageModel
from pp_models.causal_lm import CausalLMStage, add_family
from pp_models.packing import is_packed, multimodal_positions
from pp_models.vision_stages import VisionStages
from register import train_model_register

PIXEL_INPUTS = ("pixel_values", "pixel_attention_mask")


class VisionLanguageStage(VisionStages, CausalLMStage):
    """A stage of a model with a vision tower; the generic one serves most architectures."""

    auto_class = AutoModelForImageTextToText
    # small integers that belong to the images, needed where the images are
    image_inputs: tuple[str, ...] = ("image_sizes", "image_grid_thw", "num_patches")

    def model_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = super().model_inputs(batch)
        if self.is_first:
            return inputs
        images = (*PIXEL_INPUTS, *self.image_inputs)
        return {name: value for name, value in inputs.items() if name not in images}


class MultimodalRotaryStage(VisionLanguageStage):
    """A stage whose rotary positions have three axes (time, height, width): Qwen2-VL, Qwen2.5-VL.

    Positions depend on the token ids, which later stages do not embed: every stage computes them
    from the micro-batch with the model's own function.
    """

    def model_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = super().model_inputs(batch)
        if is_packed(batch):
            inputs["position_ids"] = multimodal_positions(
                batch, self.whole.base_model.get_rope_index
            )
        elif batch.get("image_grid_thw") is not None and "position_ids" not in batch:
            inputs["position_ids"], _ = self.whole.base_model.get_rope_index(
                batch["input_ids"],
                mm_token_type_ids=batch["mm_token_type_ids"],
                image_grid_thw=batch["image_grid_thw"],
                attention_mask=batch["attention_mask"],
            )
        return inputs


@train_model_register("vision_language")
def vision_language(
    *, attn_implementation: str | None = None, **kwargs: object
) -> tuple[StageModel, object, int]:
    """Any vision-language model of transformers with one list of decoder layers.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
    """
    return VisionLanguageStage.build(attn_implementation=attn_implementation, **kwargs)


VISION_LANGUAGE_MODELS = {
    "internvl": (VisionLanguageStage, ("internvl",)),
    "llava": (VisionLanguageStage, ("llava",)),
    "qwen2_5_vl": (MultimodalRotaryStage, ("qwen2_5_vl",)),
    "idefics3": (VisionLanguageStage, ("idefics3", "smolvlm")),
}

for _key, (_stage_class, _model_types) in VISION_LANGUAGE_MODELS.items():
    add_family(
        _stage_class,
        _key,
        _model_types,
        f"The vision-language model {_key}; refuses any other architecture.",
    )
