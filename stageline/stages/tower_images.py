"""The images of a micro-batch as a family's vision tower sees them: shapes, and blank images.

Every rank knows the shapes from small integers alone (token ids, grids, sizes): only the first
stage has pixels. Used where a tower lies on stages of its own (vision_stages.py).

Shapes: N image tokens of a micro-batch, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from stageline.errors import UserError
from stageline.modules.recompute import RandomState
from stageline.stages.example_batch import example_pictures

# -- what the first stage does for a micro-batch without any image: its tower sees a small picture
# Where tower or projector are trained, or the tower's weights are shared out over replicas on
# their own, all replicas are to do the same work in each micro-batch: those without a picture,
# too. What is chosen here:
#
# - The tower runs forward on the smallest picture that it takes, without a graph, and what it says
#   is thrown away. So nothing is multiplied by zero: inf or nan in it reach no hidden state, loss
#   or gradient.
# - Its weights get nothing from this micro-batch, as in plain transformers: a gradient of zeros
#   would let AdamW decay and move them in a step without any picture. Where another replica has a
#   picture, zeros are filled in when gradients are added up, sharded or not.
# - There is no backward pass through the tower. It would hold no collective: with `dp_shard` the
#   weights stay put together until the step ends, and gradients are reduced then.
# - A frozen tower whose weights are not sent on their own has nothing to do. `dp_shard` sends them
#   with all else that is no decoder layer, when the forward pass of the stage begins, picture or
#   not: the gathers match without it. The same holds without gradients, in evaluation.


def run_placeholder(
    whole: PreTrainedModel,
    tower: nn.Module,
    weights: Sequence[nn.Parameter],
    *,
    see: Callable[..., object],
) -> None:
    """Runs the tower on a placeholder, where replicas with a picture run theirs.

    Random numbers are drawn as if it had not run.

    Args:
        weights: of tower and projector.
        see: runs both on its inputs.
    """
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if not is_trained and not _is_sent_on_its_own(tower):
        return
    device = next(tower.parameters()).device
    inputs = placeholder_inputs(whole.config, dtype=whole.dtype, device=device)
    if inputs is not None:
        with torch.no_grad(), RandomState(device).replayed():
            see(**inputs)


def placeholder_inputs(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """The inputs of tower and projector for one small picture; None: not known for this model."""
    return example_pictures(config, dtype=dtype, device=device)


def _is_sent_on_its_own(tower: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in tower.modules())


# -------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]
WITH_CLASS_TOKEN = ("clip_vision_model", "internvl_vision")
FIXED_TOWERS = (*WITH_CLASS_TOKEN, "siglip_vision_model")


class TowerImages:
    """One family; the base cuts images to square tiles of one size, an equal number of tokens each.

    Args:
        config: of the whole model.

    Attributes:
        integers: names of the integers that a tower needs beside the pixels.
        num_blocks: of the tower.
        deepstack: the blocks behind which features branch off for later decoder layers.
    """

    integers: tuple[str, ...] = ()

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.vision = vision = config.vision_config
        self.width: int = getattr(vision, "embed_dim", None) or vision.hidden_size
        self.num_blocks: int = getattr(vision, "num_hidden_layers", None) or vision.depth
        self.deepstack: list[int] = list(getattr(vision, "deepstack_visual_indexes", None) or ())

    def has_images(self, batch: Batch) -> bool:
        """Whether there is an image; by the token ids, which all stages have."""
        return self.num_tokens(batch) > 0

    def num_tokens(self, batch: Batch) -> int:
        """Image tokens, one for each row of the projected features."""
        image_token = getattr(self.config, "image_token_id", None)
        if image_token is None:
            image_token = self.config.image_token_index
        return int((batch["input_ids"] == image_token).sum())

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Of the tower's hidden states; without an image, of those of a blank one."""
        num_tokens = self.num_tokens(batch)
        if num_tokens == 0:
            return self.blank_shape()
        return self.example_shape(num_tokens // self.tile_tokens())

    def blank_shape(self) -> tuple[int, ...]:
        """Of the hidden states of a blank image."""
        return self.example_shape(1)

    def example_shape(self, num_images: int) -> tuple[int, ...]:
        """Of the hidden states of so many small images."""
        has_class = self.vision.model_type in WITH_CLASS_TOKEN
        return num_images, self.tile_side() ** 2 + has_class, self.width

    def tile_tokens(self) -> int:
        """Tokens that one tile takes in the text."""
        raise NotImplementedError

    def tile_side(self) -> int:
        """Patches of a row of a tile."""
        return self.tile_size() // _one(self.vision.patch_size)

    def tile_size(self) -> int:
        """Pixels of a row of a tile."""
        return _one(self.vision.image_size)

    def pixels(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pixels of the right shape without a content, and without memory; none is zero."""
        size = self.tile_size()
        # the one number is shared, so that a thousand tiles cost nothing
        return hidden.new_ones(1).expand(len(hidden), 3, size, size)

    def refill(self, hidden: torch.Tensor, batch: Batch) -> Batch:
        """Image inputs for a stage that gets hidden states; of the pixels the shape counts."""
        integers = {name: batch[name] for name in self.integers if name in batch}
        if not integers and self.integers:
            blank = self.blank(hidden)
            integers = {name: blank[name] for name in self.integers}
        return {"pixel_values": self.pixels(hidden), **integers}

    def blank(self, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> Batch:
        """All image inputs of one small image, where a micro-batch has none."""
        inputs = placeholder_inputs(self.config, dtype=dtype, device=like.device)
        assert inputs is not None  # tower_images() has families with a known layout only
        return inputs

    def pooled(self, features_NH: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Projected features in the form that the family's `get_image_features` gives."""
        return features_NH.view(-1, self.tile_tokens(), features_NH.shape[-1])

    def earliest_state(self) -> int:
        """The first of the tower's hidden states that is projected; 0 is before its first block."""
        layers = getattr(self.config, "vision_feature_layer", -1)
        layers = layers if isinstance(layers, list | tuple) else [layers]
        return min(layer % (self.num_blocks + 1) for layer in layers)


class InternVLImages(TowerImages):
    """InternVL: tiles, 4 patches of which become a token."""

    def tile_tokens(self) -> int:
        return int(self.tile_side() * self.config.downsample_ratio) ** 2


class Gemma3Images(TowerImages):
    """Gemma 3: one tile an image, pooled to a fixed number of tokens."""

    def tile_tokens(self) -> int:
        return self.config.mm_tokens_per_image


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
                f"`vision_stages` came with a tower of type {self.vision.model_type!r}; one of "
                f"{', '.join(FIXED_TOWERS)} was expected, because stages must know the shapes of "
                "images without their pixels. Use `visual_gpu_ratio` or `partition` instead."
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
        return hidden  # as many rows as patches is all that counts

    def pooled(self, features_NH: torch.Tensor) -> list[torch.Tensor]:
        return [features_NH]

    def earliest_state(self) -> int:
        return self.num_blocks


FAMILIES: dict[str, type[TowerImages]] = {
    "gemma3": Gemma3Images,
    "idefics3": Idefics3Images,
    "internvl": InternVLImages,
    "llava": LlavaImages,
    "llava_next": LlavaNextImages,
    "qwen2_vl": GridImages,
    "qwen2_5_vl": GridImages,
    "qwen3_vl": GridImages,
    "smolvlm": Idefics3Images,
}


def tower_images(config: PretrainedConfig) -> TowerImages:
    """The images of the family of `config`.

    Raises:
        UserError: there is no tower, or none whose stages would know shapes without pixels.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"`vision_stages` came with a model of type {config.model_type!r}; one of "
            f"{', '.join(FAMILIES)} was expected, because every stage must know the shapes of a "
            "tower's hidden states. Use `visual_gpu_ratio` or `partition` to place the tower."
        )
    return family(config)


def _one(size: int | list[int] | tuple[int, ...]) -> int:
    """Of a side, or of two equal ones."""
    return size if isinstance(size, int) else size[0]
