"""Stages of Gemma3 with its vision tower: image tokens see each other, in both directions.

Every stage builds its masks with the library's code from `token_type_ids`, which all stages have.
For packed rows that code is wrong in sliding layers of transformers 5.17 to 5.23: it looks up which
image a token belongs to by the token's position in its sample, not in the row. So masks of packed
rows are made here: those of full layers by the library, those of sliding layers from them.

Shapes: B rows, T tokens.
"""

import torch
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from pp_models.packing import is_packed
from pp_models.vision_language import VisionLanguageStage, add_vision_family


class Gemma3VisionStage(VisionLanguageStage):
    """A stage of Gemma3ForConditionalGeneration."""

    def model_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = super().model_inputs(batch)
        if is_packed(batch) and "token_type_ids" in inputs:
            inputs["attention_mask"] = self._packed_masks(inputs)
        return inputs

    def _packed_masks(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        types_BT = inputs["token_type_ids"]
        full_B1TT = create_causal_mask(
            config=self.text_config,
            inputs_embeds=torch.empty(*types_BT.shape, 0, dtype=self.dtype, device=types_BT.device),
            attention_mask=None,
            past_key_values=None,
            position_ids=inputs["position_ids"],
            block_sequence_ids=get_block_sequence_ids_for_mask(types_BT),
        )
        if full_B1TT is None:  # an attention kernel that takes no mask
            return {"full_attention": None, "sliding_attention": None}
        place_T = torch.arange(types_BT.shape[1], device=types_BT.device)
        is_near_TT = place_T[None, :] > place_T[:, None] - self.text_config.sliding_window
        hidden = False if full_B1TT.dtype == torch.bool else torch.finfo(full_B1TT.dtype).min
        near_B1TT = full_B1TT.masked_fill(~is_near_TT, hidden)
        return {"full_attention": full_B1TT, "sliding_attention": near_B1TT}


add_vision_family("gemma3_vl", Gemma3VisionStage, ("gemma3",))
