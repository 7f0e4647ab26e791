"""Stages of vision-language models: tower and projector on stage 0, decoder layers on all.

Stage 0 scatters the image features into the embeddings, with the model's own code. Later stages
get hidden states, and rebuild masks and positions from the integers of the micro-batch: Gemma3
sees by `token_type_ids`, which every stage has, where a picture's tokens see each other.
"""

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from pp_models.causal_lm import CausalLMStage, add_family, run_whole
from pp_models.discover import is_pixel, plan_of
from pp_models.packing import is_packed, multimodal_positions
from pp_models.placeholder_image import run_placeholder
from pp_models.vision_stages import VisionStages
from register import train_model_register
from stageline.model_folder import load_config
from stageline.stages.example_batch import image_token
from stageline.stages.split_plan import SplitPlan

Batch = dict[str, torch.Tensor]


class VisionLanguageStage(VisionStages, CausalLMStage):
    """A stage of a model with a vision tower; the generic one serves most architectures."""

    auto_class = AutoModelForImageTextToText

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        return plan_of(whole, run_whole, kind="logits", sizes=self.sizes, takes_pictures=True)

    def has_pictures(self, batch: Batch) -> bool:
        token = image_token(self.config)
        return token is not None and bool((batch["input_ids"] == token).any())

    def model_inputs(self, batch: Batch) -> Batch:
        inputs = super().model_inputs(batch)
        if is_packed(batch) and self.has_axes:
            inputs["position_ids"] = multimodal_positions(
                batch, self.whole.base_model.get_rope_index
            )
        if self.is_first:
            return inputs
        return {name: value for name, value in inputs.items() if not is_pixel(name)}

    @property
    def has_axes(self) -> bool:
        """Whether positions have axes (time, height, width) that follow from the images' grids."""
        return hasattr(self.whole.base_model, "get_rope_index")

    def decode_positions(self, batch: Batch) -> torch.Tensor:
        if not self.has_axes or batch.get("image_grid_thw") is None:
            return super().decode_positions(batch)  # the same on all axes
        positions_3BT, _ = self.whole.base_model.get_rope_index(
            batch["input_ids"],
            mm_token_type_ids=batch["mm_token_type_ids"],
            image_grid_thw=batch["image_grid_thw"],
            attention_mask=batch["attention_mask"],
        )
        return positions_3BT

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        has_tower = self.is_first and self.paths.vision_tower and not self.vision_stages
        if has_tower and "pixel_values" not in batch and not self.only_answers:
            tower = self.get_submodule(self.paths.vision_tower)
            run_placeholder(self.whole, tower, self.front_weights(), see=self.see_images)
        return super().forward(hidden_or_ids, *extras, **batch)

    def see_images(self, **inputs: torch.Tensor) -> object:
        """Runs tower and projector alone."""
        return self.whole.base_model.get_image_features(**inputs)

    def front_weights(self) -> list[nn.Parameter]:
        """The weights of tower and projector that this stage has."""
        weights: dict[nn.Parameter, None] = {}
        for path in (*self.parts()["vit"], *self.parts()["mlp"]):
            parent, _, name = path.rpartition(".")
            found = getattr(self.get_submodule(parent), name)
            found = [found] if isinstance(found, torch.Tensor) else found.parameters()
            weights.update(dict.fromkeys(found))
        return list(weights)


@train_model_register("vision_language")
def vision_language(
    *, attn_implementation: str | None = None, **kwargs: object
) -> tuple[VisionLanguageStage, object, int]:
    """Any vision-language model of transformers with one list of decoder layers.

    An architecture with a key of its own gets the same stages as by that key.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
    """
    path = kwargs.get("config_path") or kwargs.get("checkpoint_path")
    stage_class = VisionLanguageStage
    if path is not None:
        config = load_config(path, trust_remote_code=bool(kwargs.get("trust_remote_code")))
        stage_class = stage_class_of(config.model_type)
    return stage_class.build(attn_implementation=attn_implementation, **kwargs)


VISION_LANGUAGE_MODELS: dict[str, tuple[type[VisionLanguageStage], tuple[str, ...]]] = {}


def stage_class_of(model_type: str) -> type[VisionLanguageStage]:
    """The stages of an architecture; the generic ones where it has none of its own."""
    found = (one for one, types in VISION_LANGUAGE_MODELS.values() if model_type in types)
    return next(found, VisionLanguageStage)


def add_vision_family(
    key: str, stage_class: type[VisionLanguageStage], model_types: tuple[str, ...]
) -> None:
    """Puts a family on the shelf: `stage_class` under `key`, for configs of `model_types` alone."""
    VISION_LANGUAGE_MODELS[key] = (stage_class, model_types)
    text = f"The vision-language model {key}; refuses any other architecture."
    add_family(stage_class, key, model_types, text)


add_vision_family("internvl", VisionLanguageStage, ("internvl",))
add_vision_family("llava", VisionLanguageStage, ("llava",))
add_vision_family("llava_next", VisionLanguageStage, ("llava_next",))
add_vision_family("qwen2_vl", VisionLanguageStage, ("qwen2_vl",))
add_vision_family("qwen2_5_vl", VisionLanguageStage, ("qwen2_5_vl",))
add_vision_family("qwen3_vl", VisionLanguageStage, ("qwen3_vl",))
# first: export.py takes the first key that serves a folder
add_vision_family("smolvlm", VisionLanguageStage, ("smolvlm",))
add_vision_family("idefics3", VisionLanguageStage, ("idefics3", "smolvlm"))
