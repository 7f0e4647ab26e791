"""Stages of vision-language models: tower and projector on stage 0, decoder layers on all.

Stage 0 scatters the image features into the embeddings, with the model's own code. Later stages
get hidden states, and rebuild masks and positions from the integers of the micro-batch: Gemma3
sees by `token_type_ids`, which every stage has, where a picture's tokens see each other.

Shapes: B rows, T tokens, H hidden size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from stageline.errors import UserError
from stageline.modules.recompute import RandomState
from stageline.pipeline.topology import layer_range
from stageline.stages.causal_lm import run_whole
from stageline.stages.discover import is_pixel, plan_of, sizes_of
from stageline.stages.example_batch import example_pictures, image_token
from stageline.stages.packing import axes_positions, host_positions, is_packed, multimodal_positions
from stageline.stages.split_plan import SplitPlan
from stageline.stages.vision_stages import Batch, VisionStages

CROSS_MASK = "cross_attention_mask"
IMAGE_IDS = "aspect_ratio_ids"


class VisionLanguageStage(VisionStages):
    """A stage of a model with a vision tower; the generic one serves most architectures."""

    auto_class = AutoModelForImageTextToText

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        return plan_of(whole, run_whole, kind="logits", sizes=self.sizes, takes_pictures=True)

    def has_pictures(self, batch: Batch) -> bool:
        token = image_token(self.config)
        return token is not None and bool((batch["input_ids"] == token).any())

    def host_facts(self, batch: Batch) -> Batch:
        return {**super().host_facts(batch), **host_positions(self.whole.base_model, batch)}

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().model_inputs(batch)
        is_asked = getattr(self.text_config, "use_bidirectional_attention", None) is True
        if is_asked and "token_type_ids" not in batch:  # it would read answers so, too
            raise UserError(
                f"{type(self.whole).__name__} reads a prompt in both directions and requires "
                "token_type_ids. Add them in a collate_fn of your own (0 = prompt, 1 = answer)."
            )
        if is_packed(batch) and self.has_axes and batch["position_ids"].ndim == 2:
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
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        inputs = {name: batch[name] for name in names if name in batch}
        return axes_positions(self.whole.base_model.get_rope_index, **inputs)

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        has_tower = self.is_first and self.paths.vision_tower and not self.vision_stages
        if has_tower and "pixel_values" not in batch and not self.only_answers:
            self._run_placeholder()
        return super().forward(hidden_or_ids, *extras, **batch)

    def _run_placeholder(self) -> None:
        """Runs the tower on a small picture, in a micro-batch without one.

        Where tower or projector are trained, or the tower's weights are sharded on their own, all
        replicas must do the same work in each micro-batch. The output is dropped, and the weights
        get no gradient, as in plain transformers: zeros would let AdamW move them. Random numbers
        are drawn as if it had not run.
        """
        tower = self.get_submodule(self.paths.vision_tower)
        is_trained = torch.is_grad_enabled() and any(w.requires_grad for w in self.front_weights())
        if not is_trained and not any(isinstance(one, FSDPModule) for one in tower.modules()):
            return
        device = next(tower.parameters()).device
        inputs = example_pictures(self.whole.config, dtype=self.whole.dtype, device=device)
        if inputs is not None:
            with torch.no_grad(), RandomState(device).replayed():
                self.see_images(**inputs)

    def see_images(self, **inputs: torch.Tensor) -> object:
        """Run only tower and projector."""
        return self.whole.base_model.get_image_features(**inputs)

    def front_weights(self) -> list[nn.Parameter]:
        """The weights of tower and projector that this stage has."""
        paths = tuple(f"{path}." for part in ("vit", "mlp") for path in self.parts()[part])
        return [p for name, p in self.named_parameters() if f"{name}.".startswith(paths)]


class Gemma3VisionStage(VisionLanguageStage):
    """A stage of Gemma3ForConditionalGeneration: a picture's tokens see each other, both ways.

    For packed rows the masks of sliding layers are wrong in transformers 5.17 to 5.23: it looks up
    a token's image by the position in its sample, not in the row. So they are made here: those of
    full layers by transformers, those of sliding layers from them.
    """

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().model_inputs(batch)
        if not (is_packed(batch) and "token_type_ids" in inputs):
            return inputs
        types_BT = inputs["token_type_ids"]
        if self.text_config._attn_implementation == "flex_attention":
            raise UserError(
                f"Packed rows of {type(self.whole).__name__} require a mask, which the attention "
                "flex does not take. Choose `attention` sdpa, or leave `packing` out."
            )
        full_B1TT = create_causal_mask(
            self.text_config,
            torch.empty(*types_BT.shape, 0, dtype=self.dtype, device=types_BT.device),
            None,  # no mask: borders follow from the positions
            None,  # no cache; its name changes between versions of transformers
            position_ids=inputs["position_ids"],
            block_sequence_ids=get_block_sequence_ids_for_mask(types_BT),
        )
        if full_B1TT is None:  # an attention kernel that takes no mask
            inputs["attention_mask"] = {"full_attention": None, "sliding_attention": None}
            return inputs
        assert isinstance(full_B1TT, torch.Tensor), "flex, with its own masks, was refused"
        place_T = torch.arange(types_BT.shape[1], device=types_BT.device)
        is_near_TT = place_T[None, :] > place_T[:, None] - self.text_config.sliding_window
        hidden = False if full_B1TT.dtype == torch.bool else torch.finfo(full_B1TT.dtype).min
        near_B1TT = full_B1TT.masked_fill(~is_near_TT, hidden)
        inputs["attention_mask"] = {"full_attention": full_B1TT, "sliding_attention": near_B1TT}
        return inputs


class CrossAttentionStage(VisionLanguageStage):
    """A stage of a decoder whose layers look at images by cross-attention: Mllama.

    No image token becomes features: the tower and projector on stage 0 make states, which travel
    next to the hidden states as far as the last layer that attends to them. Without images there
    are none: transformers then skips these layers, and only hidden states cross a border.

    Shapes: M images of the fullest row, P patches a tile (and one), S tiles an image, in shapes of
    borders of all images.
    """

    # its class ties nothing, whatever the config says
    is_tied = False

    @property
    def num_patches(self) -> int:
        """States of one tile: its patches and one for the whole."""
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2 + 1

    def modules_to_shard(self) -> list[torch.nn.Module]:
        """Return layers without cross-attention: a replica without images skips the others."""
        own = set(self.layers) - self.fixed_layers()
        return [layer for index, layer in self.layer_list() if index in own]

    def sizes(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        sizes = sizes_of(None, batch)
        if IMAGE_IDS in batch:
            sizes["S"] = batch[IMAGE_IDS].numel() * self.config.vision_config.max_num_tiles
        return sizes

    def get_example_input(
        self, micro_batch_size: int, max_token_num: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs for one image in each row."""
        if self.is_first:
            return super().get_example_input(micro_batch_size, max_token_num)
        lengths = {"input_ids": self.row_length(max_token_num), IMAGE_IDS: 1}
        return self.get_batch_input(
            {name: torch.empty(micro_batch_size, n, device="meta") for name, n in lengths.items()}
        )

    def get_batch_input(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if self.is_first:
            return super().get_batch_input(batch)
        return self._border(self.sizes(batch), has_pictures=self.has_pictures(batch))

    def has_pictures(self, batch: Batch) -> bool:
        return IMAGE_IDS in batch

    def see_images(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The states [S, P, H] of all images; on stage 0."""
        model = self.whole.base_model
        features = model.vision_model(**inputs).last_hidden_state
        states = model.multi_modal_projector(features)
        return states.reshape(-1, *states.shape[-2:])

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        if is_packed(batch):
            raise UserError(
                f"Layers of {self.config.model_type} attend to images by cross-attention: a packed "
                "sample attends to all images of its row. Leave `packing` out."
            )
        return super().model_inputs(batch)

    def fixed_layers(self) -> frozenset[int]:
        return frozenset(self.text_config.cross_attention_layers)

    def kept_inputs(self, batch: Batch) -> Batch:
        """Return what the last token of each prompt sees [B, M, S]: its answer sees the same."""
        if CROSS_MASK not in batch or not self.fixed_layers().intersection(self.layers):
            return {}
        return {CROSS_MASK: batch[CROSS_MASK][:, -1]}

    def decode_inputs(self, kept: Sequence[Batch], num_columns: int) -> Batch:
        """Return the mask [B, T, M, S], with as many images a row as the fullest one has.

        It has a place for each column, as older releases of transformers look up the step's there.
        """
        masks = [row.get(CROSS_MASK) for row in kept]
        seen = [mask for mask in masks if mask is not None]
        if not seen:
            return {}
        widest = max(seen, key=len)
        mask_BMS = widest.new_zeros(len(kept), *widest.shape)
        for row, mask in enumerate(masks):
            if mask is not None:
                mask_BMS[row, : len(mask)] = mask
        return {CROSS_MASK: mask_BMS[:, None].expand(-1, num_columns, -1, -1)}

    def fixed_cells(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the image cells of the stage with the largest share of cross-attention layers."""
        if IMAGE_IDS not in batch:
            return 0
        shares = []
        for stage, count in enumerate(self.partition):
            num_fixed = len(self.fixed_layers().intersection(layer_range(self.partition, stage)))
            shares.append(num_fixed / max(1, count - num_fixed))
        num_tiles = batch[IMAGE_IDS].numel() * self.config.vision_config.max_num_tiles
        return math.ceil(num_tiles * self.num_patches * max(shares))
