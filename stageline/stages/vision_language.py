"""Stages of vision-language models: tower and projector on stage 0, decoder layers on all.

Stage 0 scatters the image features into the embeddings, with the model's own code. Later stages
get hidden states, and rebuild masks and positions from the integers of the micro-batch: Gemma3
sees by `token_type_ids`, which every stage has, where a picture's tokens see each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from stageline.errors import UserError
from stageline.modules.pass_through import PassThrough, ZeroEmbedding
from stageline.pipeline.topology import layer_range, uniform_partition
from stageline.stages.causal_lm import CausalLMStage, run_whole
from stageline.stages.discover import is_pixel, plan_of, tower_blocks
from stageline.stages.example_batch import image_token
from stageline.stages.packing import is_packed, multimodal_positions
from stageline.stages.split_plan import SplitPlan
from stageline.stages.tower_images import Batch, TowerImages, run_placeholder, tower_images

# -- a vision tower on stages of its own, before those of the decoder: `vision_stages n` --------
# Stages 0 to n - 1 hold the tower's blocks, stage 0 also what comes before them and stage n - 1
# what comes behind, with the projector. Stage n is the first of the decoder: it embeds the token
# ids and scatters the image features in that came over the border. All of it is the library's own
# forward:
#
# - on a stage of the tower the blocks of earlier stages are an `Arrival`, which gives what came
#   over the border, and those of later stages a `Departure`, which ends the forward with what goes
#   on;
# - on stage n `get_image_features` gives what came.
#
# A micro-batch without an image sends one blank image through the tower, so that every stage has
# something to send and every replica does the same work. Stage n leaves its features out, and it
# goes without a graph: the tower's weights get nothing from it, as in plain transformers.

DEEPSTACK = "deepstack_merger_list"
Tensors = tuple[torch.Tensor, ...]


class Arrival(PassThrough):
    """Stands for what earlier stages have done: gives what came over the border."""

    _is_hf_initialized = True  # it has the class of a block, and nothing to be initialised

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.came: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        assert self.came is not None  # _arriving put it here
        return self.came


class Departed(Exception):
    """Ends the forward of a stage of the tower; no error."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Departure(PassThrough):
    """Stands for the first block of the next stage."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        raise Departed(super().forward(*args, **kwargs))


class VisionStages(CausalLMStage):
    """Mixed into a stage model with a tower; does nothing where `vision_stages` is 0.

    Attributes:
        images: what the stages of the tower know of images; not there without such stages.
        tower_partition: blocks of each stage of the tower.
    """

    images: TowerImages
    tower_partition: list[int]

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        stage: int,
        vision_stages: int = 0,
        vision_partition: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.tower_partition = []
        if vision_stages:
            self.images = tower_images(config)
            self.tower_partition = split_tower(self.images, vision_stages, vision_partition)
        super().__init__(config, stage=stage, vision_stages=vision_stages, **kwargs)

    # -- where this stage is ---------------------------------------------------------------

    @property
    def is_tower(self) -> bool:
        """Whether this is a stage of the tower alone."""
        return self.stage < self.vision_stages

    @property
    def is_first(self) -> bool:
        """The stage that embeds the token ids."""
        return self.stage == self.vision_stages

    @property
    def is_last_of_tower(self) -> bool:
        return self.stage == self.vision_stages - 1

    @property
    def tower_layers(self) -> range:
        """The blocks of this stage of the tower."""
        return layer_range(self.tower_partition, self.stage) if self.is_tower else range(0)

    def tower_list(self) -> list[tuple[int, nn.Module]]:
        """(index, block) of the tower's blocks that are here."""
        if not self.paths.vision_tower:
            return []
        tower = self.get_submodule(self.paths.vision_tower)
        path = tower_blocks(tower, self.config)
        blocks = enumerate(cast(nn.ModuleList, tower.get_submodule(path)) if path else ())
        return [(index, block) for index, block in blocks if not isinstance(block, PassThrough)]

    def modules_to_shard(self) -> list[nn.Module]:
        own = [block for _, block in self.tower_list()] if self.is_tower else []
        return [*own, *super().modules_to_shard()]

    # -- what crosses the borders ----------------------------------------------------------

    def get_example_input(self, micro_batch_size: int, max_token_num: int) -> Tensors:
        if not self.vision_stages or self.stage > self.vision_stages:
            return super().get_example_input(micro_batch_size, max_token_num)
        if self.stage == 0:
            return (torch.empty(micro_batch_size, max_token_num, dtype=torch.long, device="meta"),)
        return self._tower_border(self.images.example_shape(micro_batch_size), micro_batch_size)

    def get_batch_input(self, batch: Batch) -> Tensors:
        if not self.vision_stages or self.stage > self.vision_stages:
            return super().get_batch_input(batch)
        if self.stage == 0:
            return self.get_example_input(*batch["input_ids"].shape)
        return self._tower_border(
            self.images.hidden_shape(batch), max(1, self.images.num_tokens(batch))
        )

    def _tower_border(self, hidden_shape: tuple[int, ...], num_features: int) -> Tensors:
        """Hidden states of the tower, or image features; and the features that branched off."""
        num_blocks = sum(self.tower_partition[: self.stage])
        features = (num_features, self.text_config.hidden_size)
        branches = [features for index in self.images.deepstack if index < num_blocks]
        shapes = [features if self.is_first else hidden_shape, *branches]
        return tuple(torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes)

    # -- what is here ----------------------------------------------------------------------

    def prune(self, whole: PreTrainedModel) -> None:
        if not self.vision_stages:
            super().prune(whole)
            return
        paths = self.paths
        front = (paths.vision_tower, paths.projector, *paths.beside_projector)
        kept = {path: _get(whole, path) for path in front}
        super().prune(whole)
        if self.is_first:
            for path in reversed(front):
                _replace(whole, path)
        elif self.is_tower:
            tower = kept[paths.vision_tower]
            _put(whole, paths.vision_tower, tower)
            for path in front[1:]:
                stays = self.is_last_of_tower or path.endswith(DEEPSTACK)
                is_inside = path.startswith(paths.vision_tower + ".")
                if is_inside and not stays:
                    _replace(whole, path)
                elif stays and not is_inside:
                    _put(whole, path, kept[path])
            self._prune_tower(whole.get_submodule(paths.vision_tower))

    def _prune_tower(self, tower: nn.Module) -> None:
        path, own = tower_blocks(tower, self.config), self.tower_layers
        blocks = cast(nn.ModuleList, tower.get_submodule(path))
        for index, block in enumerate(blocks):
            if index < own.start:
                blocks[index] = _arrival(block)
            elif index >= own.stop:
                blocks[index] = Departure()
        is_behind = False
        for name, child in tower.named_children():
            if name == path.partition(".")[0]:
                is_behind = True
            elif name == DEEPSTACK:
                self._prune_branches(cast(nn.ModuleList, child))
            elif next(child.parameters(), None) is None:
                continue  # rotary tables: every stage computes them
            elif is_behind and not self.is_last_of_tower:
                tower.set_submodule(name, PassThrough())
            elif not is_behind and self.stage > 0:
                is_table = isinstance(child, nn.Embedding)
                tower.set_submodule(name, ZeroEmbedding() if is_table else Arrival())

    def _prune_branches(self, mergers: nn.ModuleList) -> None:
        own = self.tower_layers
        for place, index in enumerate(self.images.deepstack):
            if index not in own:
                mergers[place] = Arrival() if index < own.start else PassThrough()

    # -- passes ----------------------------------------------------------------------------

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | Tensors:
        if self.is_tower:
            return self._look(hidden_or_ids, extras, batch)
        if self.vision_stages and self.is_first:
            return self._begin(hidden_or_ids, extras, batch)
        return super().forward(hidden_or_ids, *extras, **batch)

    def _look(self, ids_or_hidden: torch.Tensor, branches: Tensors, batch: Batch) -> Tensors:
        """Runs the tower's blocks of this stage; on its last stage, the projector too."""
        has_images = self.images.has_images(batch)
        keeps_graph = torch.is_grad_enabled() and has_images
        with self._arriving(ids_or_hidden, branches) as made, torch.set_grad_enabled(keeps_graph):
            try:
                inputs = self._image_inputs(ids_or_hidden, batch)
                features = self.whole.base_model.get_image_features(**inputs).pooler_output
            except Departed as border:
                return border.hidden, *made
            features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
        # of a blank image one row, so that all know how many
        return features if has_images else features[:1], *made

    def _image_inputs(self, ids_or_hidden: torch.Tensor, batch: Batch) -> Batch:
        if self.stage > 0:
            return self.images.refill(ids_or_hidden, batch)
        if "pixel_values" not in batch:
            return self.images.blank(ids_or_hidden, self.dtype)
        names = ("pixel_values", "pixel_attention_mask", *self.images.integers)
        return {name: batch[name] for name in names if name in batch}

    @contextmanager
    def _arriving(self, came: torch.Tensor, branches: Tensors) -> Iterator[list[torch.Tensor]]:
        """Puts what came where it is wanted; collects the features that branch off so far."""
        tower = self.get_submodule(self.paths.vision_tower)
        # cloned: an input that is handed on as it came would have no pass of its own
        made = [branch.clone() for branch in branches]
        mergers = list(getattr(tower, DEEPSTACK, ()))
        values = {id(merger): branch for merger, branch in zip(mergers, branches, strict=False)}
        arrivals = [module for module in tower.modules() if isinstance(module, Arrival)]
        for arrival in arrivals:
            arrival.came = values.get(id(arrival), came)
        hooks = [
            merger.register_forward_hook(lambda module, args, output: made.append(output))
            for merger in mergers
            if not isinstance(merger, PassThrough)
        ]
        try:
            yield made
        finally:
            for arrival in arrivals:
                arrival.came = None
            for hook in hooks:
                hook.remove()

    def _begin(
        self, features: torch.Tensor, branches: Tensors, batch: Batch
    ) -> torch.Tensor | Tensors:
        """Runs the decoder's first layers, on embeddings with the features in their places."""
        batch = {name: value for name, value in batch.items() if not name.startswith("pixel")}
        # token ids come where text alone is tried: the check of packed rows
        if not (features.is_floating_point() and self.images.has_images(batch)):
            output = super().forward(batch["input_ids"], **batch)
            return _with_nothing_of((features, *branches), output)
        batch["pixel_values"] = features
        outputs = SimpleNamespace(
            pooler_output=self.images.pooled(features),
            deepstack_features=[[branch] for branch in branches],
        )
        base = self.whole.base_model
        base.__dict__["get_image_features"] = lambda *args, **kwargs: outputs
        try:
            return super().forward(batch["input_ids"], **batch)
        finally:
            del base.__dict__["get_image_features"]


def split_tower(images: TowerImages, num_stages: int, counts: list[int] | None) -> list[int]:
    """Blocks of each stage of a tower.

    Raises:
        UserError: a stage without a block, or whose later stages need what only an earlier has.
    """
    num_blocks = images.num_blocks
    if num_stages > num_blocks:
        raise UserError(
            f"`vision_stages` {num_stages} came for a tower of {num_blocks} blocks; each stage "
            f"needs at least one. Set `vision_stages` to {num_blocks} or less."
        )
    counts = counts or uniform_partition(num_blocks, num_stages)
    shown = ",".join(map(str, counts))
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_blocks:
        raise UserError(
            f"`vision_partition` {shown} came for {num_stages} stages of a tower of {num_blocks} "
            "blocks. One count a stage was expected, each at least 1, with that sum: every block "
            "lies on one stage. Change the counts, or leave them out for an even split."
        )
    earliest = images.earliest_state()
    if earliest < num_blocks - counts[-1]:
        raise UserError(
            f"`vision_stages`: the last of {num_stages} stages holds blocks from "
            f"{num_blocks - counts[-1]} on, the projector takes what comes before block "
            f"{earliest} (vision_feature_layer of the model). It must come from the last stage, "
            f"because one tensor crosses a border: give it {num_blocks - earliest} blocks or more "
            "by `vision_partition`."
        )
    return counts


def _arrival(block: nn.Module) -> Arrival:
    """An `Arrival` that the library counts as a block, where it records what blocks give."""
    return type(type(block).__name__, (Arrival, type(block)), {})()


def _with_nothing_of(inputs: Tensors, output: torch.Tensor | Tensors) -> torch.Tensor | Tensors:
    """The output, with inputs in its graph: torch 2.11 splits no backward pass past others."""
    first, *others = output if isinstance(output, tuple) else (output,)
    for tensor in inputs:
        if tensor.requires_grad:
            first = first + tensor[:0].sum().to(first.dtype)
    return (first, *others) if others else first


def _replace(whole: PreTrainedModel, path: str) -> None:
    parent, _, name = path.rpartition(".")
    try:
        module = whole.get_submodule(parent)
    except AttributeError:
        return  # its parent went before it: a projector inside a vision tower
    if name in module._parameters:
        delattr(module, name)
        # no longer a weight, but the library's own initialisation writes into it
        setattr(module, name, torch.empty(0, device="cpu"))
    else:
        setattr(module, name, PassThrough())


def _get(whole: PreTrainedModel, path: str) -> nn.Module | nn.Parameter:
    parent, _, name = path.rpartition(".")
    return getattr(whole.get_submodule(parent), name)


def _put(whole: PreTrainedModel, path: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, name = path.rpartition(".")
    setattr(whole.get_submodule(parent), name, value)


# -------------------------------------------------------------------------------------------------


class VisionLanguageStage(VisionStages):
    """A stage of a model with a vision tower; the generic one serves most architectures."""

    auto_class = AutoModelForImageTextToText

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        return plan_of(whole, run_whole, kind="logits", sizes=self.sizes, takes_pictures=True)

    def has_pictures(self, batch: Batch) -> bool:
        token = image_token(self.config)
        return token is not None and bool((batch["input_ids"] == token).any())

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
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


# -- stages of Gemma3 with its vision tower: image tokens see each other, in both directions ------
# Every stage builds its masks with the library's code from `token_type_ids`, which all stages
# have. For packed rows that code is wrong in sliding layers of transformers 5.17 to 5.23: it looks
# up which image a token belongs to by the token's position in its sample, not in the row. So masks
# of packed rows are made here: those of full layers by the library, those of sliding layers from
# them.
#
# Shapes: B rows, T tokens.


class Gemma3VisionStage(VisionLanguageStage):
    """A stage of Gemma3ForConditionalGeneration."""

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = super().model_inputs(batch)
        if is_packed(batch) and "token_type_ids" in inputs:
            inputs["attention_mask"] = self._packed_masks(inputs)
        return inputs

    def _packed_masks(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        types_BT = inputs["token_type_ids"]
        if self.text_config._attn_implementation == "flex_attention":
            raise UserError(
                f"`packing` came for {type(self.whole).__name__} with the attention flex. A kernel "
                "that takes a mask of numbers was expected, because the mask of the sliding window "
                "is cut out of that of whole rows: choose `attention` sdpa, or leave `packing` out."
            )
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
