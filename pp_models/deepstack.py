"""Stages of models whose tower also speaks to deeper layers: Qwen3-VL and its deepstack features.

Feature i is added to the image tokens behind decoder layer i. All features are made on stage 0;
those of layers on later stages travel beside the hidden states, from stage to stage, as long as a
later stage still has their layer. Their number of rows is that of the image tokens, which every
rank counts in the token ids; a micro-batch without images has none.

Shapes: B rows, T tokens, H hidden size, N image tokens of the micro-batch.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pp_models.vision_language import MultimodalRotaryStage, add_vision_family
from stageline.pipeline.partition import layer_range


class DeepstackStage(MultimodalRotaryStage):
    """A stage of a model whose text model takes `deepstack_visual_embeds`."""

    def adopt(self, whole: PreTrainedModel) -> None:
        super().adopt(whole)
        self._features: dict[int, torch.Tensor] = {}  # of layers here and later; of one forward
        self._is_image_BT: torch.Tensor | None = None
        # the model's own forward hands the features to its text model: they are put in there
        self.get_submodule(self.paths.text_model).register_forward_pre_hook(
            self._exchange, with_kwargs=True
        )

    @property
    def num_features(self) -> int:
        """How many layers, from the first one on, get features of their own."""
        return len(self.config.vision_config.deepstack_visual_indexes)

    def get_batch_input(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tensors = super().get_batch_input(batch)
        count = int(self._is_image(batch).sum()) if "image_grid_thw" in batch else 0
        if self.is_tower or self.is_first or not count:
            return tensors
        shape_NH = (count, self.text_config.hidden_size)
        feature_NH = torch.empty(shape_NH, dtype=self.dtype, device="meta")
        # not self.layers: a stage is asked about the one behind it by its number alone
        layers = layer_range(self.partition, self.stage)
        return (*tensors, *[feature_NH] * len(self._features_from(layers.start)))

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.is_tower:
            return super().forward(hidden_or_ids, *extras, **batch)
        # of a tower on stages of its own: the model's own forward hands them over, as if made here
        fresh, extras = (extras, ()) if self.is_first else ((), extras)
        awaited = self._features_from(self.layers.start) if extras else ()
        self._features = dict(zip(awaited, extras, strict=True))
        self._is_image_BT = self._is_image(batch) if extras else None
        try:
            hidden = super().forward(hidden_or_ids, *fresh, **batch)
            sent = () if self.is_last else self._features_from(self.layers.stop)
            # cloned: an input that is handed on as it came would have no pass of its own
            rest = [self._features[i].clone() for i in sent if i in self._features]
        finally:
            self._features, self._is_image_BT = {}, None
        return (hidden, *rest) if rest else hidden

    def _features_from(self, layer: int) -> range:
        return range(min(layer, self.num_features), self.num_features)

    def _is_image(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["input_ids"] == self.config.image_token_id

    def _exchange(
        self, text_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes what stage 0's tower gave, and gives the text model what its own layers need."""
        hidden = kwargs["inputs_embeds"]
        made = kwargs.get("deepstack_visual_embeds")
        if made is not None:
            # the library up to 5.17 hands on what get_image_features gave, an entry an image
            whole = [v if isinstance(v, torch.Tensor) else torch.cat(v) for v in made]
            self._features = {i: value.to(hidden.dtype) for i, value in enumerate(whole)}
        mask = kwargs.get("visual_pos_masks")
        kwargs["visual_pos_masks"] = self._is_image_BT if mask is None else mask
        kwargs["deepstack_visual_embeds"] = self._own_features()
        return args, kwargs

    def _own_features(self) -> list[torch.Tensor] | None:
        own = [i for i in self.layers if i in self._features]
        if not own:
            return None
        # the text model adds the i-th one behind layer i, also where that is a placeholder: zeros
        nothing = torch.zeros_like(self._features[own[0]][:1]).detach()
        return [
            self._features[i] if i in own else nothing.expand_as(self._features[own[0]])
            for i in range(own[-1] + 1)
        ]


add_vision_family("qwen3_vl", DeepstackStage, ("qwen3_vl",))
