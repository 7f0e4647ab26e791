"""A vision tower on stages of its own, before those of the decoder: `vision_stages n`.

Stages 0 to n - 1 hold the tower's blocks, stage 0 also what comes before them and stage n - 1 what
comes behind, with the projector. Stage n is the first of the decoder. The splice drops what a stage
does not own, as everywhere, and all stages run the model's own forward: in a tower the blocks of
earlier stages give what came over the border (an `Arrival`), and the first of a later stage ends
the forward (a `Departure`); on stage n `get_image_features` gives what came.

A micro-batch without an image sends one blank image through the tower without a graph, so that
every stage has something to send and every replica does the same work. Shapes follow from small
integers (token ids, grids, sizes): only the first stage has pixels.

Shapes: N image tokens of a micro-batch, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from stageline.errors import UserError
from stageline.modules.pass_through import PassThrough, ZeroEmbedding
from stageline.pipeline.topology import layer_range, uniform_partition
from stageline.stages.causal_lm import CausalLMStage
from stageline.stages.discover import is_in, tower_blocks
from stageline.stages.example_batch import example_pictures, image_token, side_of
from stageline.stages.splice import Absent, Cut

Batch = dict[str, torch.Tensor]
WITH_CLASS_TOKEN = ("clip_vision_model", "internvl_vision")
FIXED_TOWERS = (*WITH_CLASS_TOKEN, "siglip_vision_model")


class TowerImages:
    """One family; the base cuts images to square tiles of one size, an equal number of tokens each.

    Attributes:
        integers: names of the integers that a tower needs in addition to the pixels.
        deepstack: the blocks behind which features branch off for later decoder layers.
    """

    integers: tuple[str, ...] = ()

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.vision = vision = config.vision_config
        self.width: int = getattr(vision, "embed_dim", None) or vision.hidden_size
        self.num_blocks: int = getattr(vision, "num_hidden_layers", None) or vision.depth
        self.deepstack: list[int] = list(getattr(vision, "deepstack_visual_indexes", None) or ())

    def num_tokens(self, batch: Batch) -> int:
        """Image tokens, one for each row of the projected features."""
        token = image_token(self.config)
        assert token is not None  # families here have one
        return int((batch["input_ids"] == token).sum())

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the tower's hidden states; without an image, for a blank one."""
        num_tokens = self.num_tokens(batch)
        if num_tokens == 0:
            return self.blank_shape()
        return self.example_shape(num_tokens // self.tile_tokens())

    def blank_shape(self) -> tuple[int, ...]:
        return self.example_shape(1)

    def example_shape(self, num_images: int) -> tuple[int, ...]:
        """Return the shape of the hidden states of `num_images` small images."""
        has_class = self.vision.model_type in WITH_CLASS_TOKEN
        return num_images, self.tile_side() ** 2 + has_class, self.width

    def tile_tokens(self) -> int:
        """Tokens that one tile takes in the text."""
        ratio = getattr(self.config, "downsample_ratio", None)
        if ratio is not None:  # InternVL: 4 patches become a token
            return int(self.tile_side() * ratio) ** 2
        return self.config.mm_tokens_per_image  # Gemma 3: pooled to a fixed number

    def tile_side(self) -> int:
        """Patches of a row of a tile."""
        return self.tile_size() // side_of(self.vision.patch_size)

    def tile_size(self) -> int:
        """Pixels of a row of a tile."""
        return side_of(self.vision.image_size)

    def pixels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pixels of the right shape without a content, and without memory; none is zero."""
        size = self.tile_size()
        return hidden.new_ones(1).expand(len(hidden), 3, size, size)

    def refill(self, hidden: torch.Tensor, batch: Batch) -> Batch:
        """Image inputs for a stage that gets hidden states; of the pixels the shape counts."""
        if self.integers and self.integers[0] not in batch:
            batch = self.blank(hidden)
        return {
            "pixel_values": self.pixels(hidden),
            **{name: batch[name] for name in self.integers},
        }

    def blank(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> Batch:
        """All image inputs of one small image, where a micro-batch has none."""
        inputs = example_pictures(self.config, dtype=dtype, device=like.device)
        assert inputs is not None  # families here have a known layout
        return inputs

    def pooled(self, features_NH: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Projected features in the form that the family's `get_image_features` gives."""
        return features_NH.view(-1, self.tile_tokens(), features_NH.shape[-1])

    def earliest_state(self) -> int:
        """The first of the tower's hidden states that is projected; 0 is before its first block."""
        layers = getattr(self.config, "vision_feature_layer", -1)
        layers = layers if isinstance(layers, list | tuple) else [layers]
        return min(layer % (self.num_blocks + 1) for layer in layers)


class Idefics3Images(TowerImages):
    """Idefics 3, SmolVLM: tiles in a row, `scale_factor` squared patches a token."""

    def tile_tokens(self) -> int:
        return (self.tile_side() // self.config.scale_factor) ** 2

    def blank_shape(self) -> tuple[int, ...]:
        return 1, self.config.scale_factor**2, self.width

    def pixels(self, hidden: torch.Tensor) -> torch.Tensor:
        size = int(hidden.shape[1] ** 0.5) * self.vision.patch_size
        return hidden.new_ones(1).expand(1, len(hidden), 3, size, size)


class LlavaImages(TowerImages):
    """LLaVA: one tile an image, a token for each patch."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if self.vision.model_type not in FIXED_TOWERS:
            raise UserError(
                f"`vision_stages` takes a tower of type {', '.join(FIXED_TOWERS)}, not "
                f"{self.vision.model_type!r}. Use `visual_gpu_ratio` or `partition`."
            )

    def tile_tokens(self) -> int:
        num_states = self.example_shape(1)[1]
        return num_states - (self.config.vision_feature_select_strategy == "default")

    def pooled(self, features_NH: torch.Tensor) -> list[torch.Tensor]:
        return [features_NH]


class LlavaNextImages(LlavaImages):
    """LLaVA-NeXT: as many tiles as the size of an image asks for."""

    integers = ("image_sizes",)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        if "image_sizes" not in batch:
            return self.blank_shape()
        return self.example_shape(self._num_tiles(batch["image_sizes"].tolist()))

    def blank_shape(self) -> tuple[int, ...]:
        return self.example_shape(self._num_tiles([[self.tile_size()] * 2]))

    def _num_tiles(self, sizes: list[list[int]]) -> int:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        pinpoints, size = self.config.image_grid_pinpoints, self.tile_size()
        return sum(image_size_to_num_patches(each, pinpoints, size) for each in sizes)


class GridImages(TowerImages):
    """Qwen-VL: images of any size, all patches in one row."""

    integers = ("image_grid_thw",)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        grid = batch.get("image_grid_thw")
        return self.blank_shape() if grid is None else (int(grid.prod(-1).sum()), self.width)

    def example_shape(self, num_images: int) -> tuple[int, ...]:
        return num_images * self.vision.spatial_merge_size**2, self.width

    def pixels(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden  # only the number of patches, which is its number of rows, counts

    def pooled(self, features_NH: torch.Tensor) -> list[torch.Tensor]:
        return [features_NH]

    def earliest_state(self) -> int:
        return self.num_blocks


FAMILIES: dict[str, type[TowerImages]] = {
    "gemma3": TowerImages,
    "idefics3": Idefics3Images,
    "internvl": TowerImages,
    "llava": LlavaImages,
    "llava_next": LlavaNextImages,
    "qwen2_vl": GridImages,
    "qwen2_5_vl": GridImages,
    "qwen3_vl": GridImages,
    "smolvlm": Idefics3Images,
}


DEEPSTACK = "deepstack_merger_list"
Tensors = tuple[torch.Tensor, ...]


class Arrival(PassThrough):
    """Stand-in for the blocks of earlier stages: returns the tensor from the border."""

    _is_hf_initialized = True  # it has the class of a block, and nothing to be initialised

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.came: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        assert self.came is not None  # _arriving put it here
        return self.came


class Departure(PassThrough):
    """Stands for the blocks of later stages: the first one ends the forward."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        raise Cut(super().forward(*args, **kwargs))


class VisionStages(CausalLMStage):
    """Mixed into a stage model with a tower; does nothing where `vision_stages` is 0.

    Attributes:
        images: what the stages of the tower know of images; not there without such stages.
        tower_partition: blocks of each stage of the tower.
        blocks: path of their list inside of the tower.
        before_blocks: children of the tower that run before them.
    """

    images: TowerImages
    tower_partition: list[int]
    blocks: str
    before_blocks: list[str]

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
            if config.model_type not in FAMILIES:
                raise UserError(
                    f"`vision_stages` serves {', '.join(FAMILIES)}, not {config.model_type!r}. Use "
                    "`visual_gpu_ratio` or `partition` to place the tower."
                )
            self.images = FAMILIES[config.model_type](config)
            self.tower_partition = split_tower(self.images, vision_stages, vision_partition)
        super().__init__(config, stage=stage, vision_stages=vision_stages, **kwargs)

    @property
    def is_tower(self) -> bool:
        """Whether this stage has only blocks of the tower."""
        return self.stage < self.vision_stages

    @property
    def is_first(self) -> bool:
        """The stage that embeds the token ids."""
        return self.stage == self.vision_stages

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

    def get_example_input(self, micro_batch_size: int, max_token_num: int | None = None) -> Tensors:
        if not self.vision_stages or self.stage > self.vision_stages:
            return super().get_example_input(micro_batch_size, max_token_num)
        if self.stage == 0:
            shape = (micro_batch_size, self.row_length(max_token_num))
            return (torch.empty(shape, dtype=torch.long, device="meta"),)
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

    def owns(self, name: str) -> bool:
        paths = self.paths
        front = (paths.vision_tower, paths.projector, *paths.beside_projector)
        if not self.vision_stages or not any(is_in(name, path) for path in front):
            return super().owns(name)
        if not self.is_tower:
            return False
        # the block whose stage has it
        child, *rest = name.removeprefix(paths.vision_tower + ".").split(".")
        block = self.images.num_blocks - 1
        if is_in(name, f"{paths.vision_tower}.{self.blocks}"):
            block = int(rest[self.blocks.count(".")])
        elif child == DEEPSTACK:
            block = self.images.deepstack[int(rest[0])]
        elif is_in(name, paths.vision_tower) and child in self.before_blocks:
            block = 0
        return block in self.tower_layers

    def prune(self, whole: PreTrainedModel) -> None:
        if not self.vision_stages:
            super().prune(whole)
            return
        tower = whole.get_submodule(self.paths.vision_tower)
        self.blocks = tower_blocks(tower, self.config)
        names = [name for name, _ in tower.named_children()]
        self.before_blocks = names[: names.index(self.blocks.partition(".")[0])]
        super().prune(whole)
        if not self.is_tower:
            return
        blocks, own = cast(nn.ModuleList, tower.get_submodule(self.blocks)), self.tower_layers
        for index, block in enumerate(blocks):
            if index < own.start:
                # transformers records outputs of blocks by class: this subclass counts as a block
                kind = type(cast(Absent, block).original)
                blocks[index] = type(kind.__name__, (Arrival, kind), {})()
            elif index >= own.stop:
                blocks[index] = Departure()
        for name in self.before_blocks:
            if isinstance(child := tower.get_submodule(name), Absent):
                is_table = isinstance(child.original, nn.Embedding)
                tower.set_submodule(name, ZeroEmbedding() if is_table else Arrival())
        for place, index in enumerate(self.images.deepstack):
            if index < own.start:
                cast(nn.ModuleList, tower.get_submodule(DEEPSTACK))[place] = Arrival()

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | Tensors:
        if self.is_tower:
            return self._look(hidden_or_ids, extras, batch)
        if self.vision_stages and self.is_first:
            return self._begin(hidden_or_ids, extras, batch)
        return super().forward(hidden_or_ids, *extras, **batch)

    def _look(self, ids_or_hidden: torch.Tensor, branches: Tensors, batch: Batch) -> Tensors:
        """Run the tower's blocks of this stage; on its last stage, the projector too."""
        has_images = self.images.num_tokens(batch) > 0
        keeps_graph = torch.is_grad_enabled() and has_images
        with self._arriving(ids_or_hidden, branches) as made, torch.set_grad_enabled(keeps_graph):
            try:
                if self.stage > 0:
                    inputs = self.images.refill(ids_or_hidden, batch)
                elif "pixel_values" in batch:
                    names = ("pixel_values", "pixel_attention_mask", *self.images.integers)
                    inputs = {name: batch[name] for name in names if name in batch}
                else:
                    inputs = self.images.blank(ids_or_hidden, self.dtype)
                features = self.whole.base_model.get_image_features(**inputs).pooler_output
            except Cut as border:
                return border.args[0], *made
            features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
        # a blank image gives one row, so that all stages know the number of rows
        return features if has_images else features[:1], *made

    @contextmanager
    def _arriving(self, came: torch.Tensor, branches: Tensors) -> Iterator[list[torch.Tensor]]:
        """Put received tensors in their places; collect the features that branch off so far."""
        tower = self.get_submodule(self.paths.vision_tower)
        # clone: an input that is handed on unchanged would have no pass of its own
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
        # the check of packed rows sends only text, so token ids arrive here
        if not (features.is_floating_point() and self.images.num_tokens(batch)):
            output = super().forward(batch["input_ids"], **batch)
            return _with_nothing_of((features, *branches), output)
        batch["pixel_values"] = features
        # transformers 5.24 turns the outputs of the tower into a tuple, too
        pooled: Any = self.images.pooled(features)
        outputs: Any = BaseModelOutputWithPooling(pooler_output=pooled)
        outputs.deepstack_features = [[branch] for branch in branches]
        base = self.whole.base_model
        base.__dict__["get_image_features"] = lambda *args, **kwargs: outputs
        try:
            return super().forward(batch["input_ids"], **batch)
        finally:
            del base.__dict__["get_image_features"]


def split_tower(images: TowerImages, num_stages: int, counts: list[int] | None) -> list[int]:
    """Blocks of each stage of a tower, as given or evenly."""
    num_blocks = images.num_blocks
    if num_stages > num_blocks:
        raise UserError(
            f"`vision_stages` {num_stages} is more than the tower of {num_blocks} blocks has. Set "
            f"it to {num_blocks} or less."
        )
    counts = counts or uniform_partition(num_blocks, num_stages)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_blocks:
        raise UserError(
            f"`vision_partition` {','.join(map(str, counts))} does not fit a tower of {num_blocks} "
            f"blocks on {num_stages} stages. Give one count a stage, each at least 1."
        )
    earliest = images.earliest_state()
    if earliest < num_blocks - counts[-1]:
        raise UserError(
            f"The projector takes what comes before block {earliest}, and the last of {num_stages} "
            f"stages begins at block {num_blocks - counts[-1]}. Use `vision_partition` to give it "
            f"{num_blocks - earliest} blocks or more."
        )
    return counts


def _with_nothing_of(inputs: Tensors, output: torch.Tensor | Tensors) -> torch.Tensor | Tensors:
    """The output, with inputs in its graph: torch 2.11 splits no backward pass past others."""
    first, *others = output if isinstance(output, tuple) else (output,)
    for tensor in inputs:
        if tensor.requires_grad:
            first = first + tensor[:0].sum().to(first.dtype)
    return (first, *others) if others else first
