"""Stages of models whose layers look at images by cross-attention: Mllama (Llama 3.2 Vision).

No image token becomes features: the tower and projector on stage 0 make states, which layers in
between attend to. The states travel beside the hidden states as far as the last such layer. Masks
are rebuilt on every stage from the integers of the micro-batch.

A micro-batch without images has no states: the library then passes by the layers that would look
at them, and nothing but hidden states crosses a border.

Shapes: B rows, T tokens, M images of the fullest row, P patches a tile (and one), H hidden size; S
tiles an image, in shapes of borders of all images.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stageline.errors import UserError
from stageline.stages.discover import sizes_of
from stageline.stages.packing import is_packed
from stageline.stages.vision_language import VisionLanguageStage

Batch = dict[str, torch.Tensor]
CROSS_MASK = "cross_attention_mask"
IMAGE_IDS = "aspect_ratio_ids"


class CrossAttentionStage(VisionLanguageStage):
    """A stage of a decoder in which some layers attend to images instead of to the text."""

    # its class ties nothing, whatever the config says
    is_tied = False

    @property
    def num_patches(self) -> int:
        """States of one tile: its patches and one for the whole."""
        vision = self.config.vision_config
        return (vision.image_size // vision.patch_size) ** 2 + 1

    def looks_at_images(self, layers: range) -> bool:
        """Whether one of these layers attends to images."""
        return any(index in layers for index in self.text_config.cross_attention_layers)

    def modules_to_shard(self) -> list[torch.nn.Module]:
        """Not those that attend to images: a replica without images passes them by.

        Weights of its own are gathered when a module is called, and all replicas must call it.
        """
        attending = self.text_config.cross_attention_layers
        own = set(self.layers).difference(attending)
        return [layer for index, layer in self.layer_list() if index in own]

    def sizes(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        sizes = sizes_of(None, batch)
        if IMAGE_IDS in batch:
            sizes["S"] = batch[IMAGE_IDS].numel() * self.config.vision_config.max_num_tiles
        return sizes

    def get_example_input(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]:
        """As for one image in each row."""
        if self.is_first:
            return super().get_example_input(micro_batch_size, max_token_num)
        shapes = {"input_ids": (micro_batch_size, max_token_num), IMAGE_IDS: (micro_batch_size, 1)}
        return self.get_batch_input(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
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
                "`packing` came for a model whose layers attend to images by cross-attention "
                f"({self.config.model_type}). One sample in each row was expected, because a "
                "token before the first image of its sample attends to all images of its row: "
                "leave `packing` out (samples of similar length travel together anyway)."
            )
        return super().model_inputs(batch)

    def fixed_layers(self) -> frozenset[int]:
        return frozenset(self.text_config.cross_attention_layers)

    def kept_inputs(self, batch: Batch) -> Batch:
        """What the last token of each prompt sees [B, M, S]: its answer sees the same."""
        if CROSS_MASK not in batch or not self.looks_at_images(self.layers):
            return {}
        return {CROSS_MASK: batch[CROSS_MASK][:, -1]}

    def decode_inputs(self, kept: Sequence[Batch], num_columns: int) -> Batch:
        """The mask [B, T, M, S], by rows as many images as the fullest one has.

        It has a place for each column before the step's too: older releases of the library look
        theirs up there, newer ones cut the last one out. Rows of text alone see nothing.
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

    def fixed_cells(self, batch: Batch) -> int:
        """As on the stage where layers that look at images are most, by the others there."""
        if IMAGE_IDS not in batch:
            return 0
        fixed, shares, start = self.fixed_layers(), [], 0
        for count in self.partition:
            own = range(start, start + count)
            num_fixed = sum(index in fixed for index in own)
            shares.append(num_fixed / max(1, count - num_fixed))
            start += count
        num_tiles = batch[IMAGE_IDS].numel() * self.config.vision_config.max_num_tiles
        return math.ceil(num_tiles * self.num_patches * max(shares))
