"""What each part of a model needs on its device, from the model on the meta device.

Parts: the layers; the tower with its projector; and the ends, which are embeddings, norms, head
and whatever else lies beside layers. Loads nothing.
"""

from dataclasses import dataclass

import torch
from torch import nn

from stageline.inference.meta_model import blocks_path, layers_path, text_model_path
from stageline.inference.pass_bytes import Load, on_meta, pass_bytes
from stageline.inference.weight_bytes import stored_of, tensor_sizes
from stageline.pipeline.live_bytes import PeakBytes

# copies of the last logits that a step holds in float32 while it chooses a token
LOGIT_COPIES = 3


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer; `beyond` as in `PassBytes`."""

    weights: int
    cache: int = 0
    beyond: int = 0
    workspace: int = 0

    @property
    def lasting(self) -> int:
        """All but the workspace."""
        return self.weights + self.cache + self.beyond


@dataclass(frozen=True)
class ModelBytes:
    """Of a whole model for one load.

    Attributes:
        ends: weights of embeddings, norms and head; a tied head counts once.
        vision: weights of tower and projector.
        blocks: of `vision`, those of each block of the tower, where it can be cut.
        vision_workspace: while the tower looks at the images of all rows.
        end_workspace: while a token is chosen from the logits.
    """

    layers: tuple[LayerBytes, ...]
    ends: int
    vision: int = 0
    vision_workspace: int = 0
    end_workspace: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def weights(self) -> int:
        """All of them."""
        return self.ends + self.vision + sum(layer.weights for layer in self.layers)


def measure_model(model: nn.Module, load: Load) -> ModelBytes:
    """Looks at a model on the meta device; a config with quantised weights counts as such."""
    path, text_path = f"{layers_path(model)}.", text_model_path(model)
    sizes = tensor_sizes(model, stored_of(model.config))
    weights = [0] * len(model.get_submodule(path[:-1]))
    tower = blocks_path(model)
    blocks = [0] * (len(model.get_submodule(tower)) if tower else 0)
    ends = vision = 0
    for name, size in sizes.items():
        if name.startswith(path):
            weights[int(name[len(path) :].partition(".")[0])] += size
        elif _is_end(model, name, text_path):
            ends += size
        else:
            vision += size
            if tower and name.startswith(f"{tower}."):
                blocks[int(name[len(tower) + 1 :].partition(".")[0])] += size
    images = _Images(model, load)
    passes = pass_bytes(model, load, image_tokens=load.images * images.tokens_of_one())
    layers = zip(weights, passes.cache, passes.beyond, passes.workspace, strict=True)
    config = model.config.get_text_config(decoder=True)
    logit = load.rows * config.vocab_size
    return ModelBytes(
        layers=tuple(LayerBytes(*layer) for layer in layers),
        ends=ends,
        vision=vision,
        vision_workspace=images.workspace(),
        blocks=tuple(blocks),
        end_workspace=logit * (model.dtype.itemsize + 4 * LOGIT_COPIES),
    )


def _is_end(model: nn.Module, name: str, text_path: str) -> bool:
    if getattr(model.config, "vision_config", None) is None:
        return True
    head = model.get_output_embeddings()
    owner = model.get_submodule(name.rpartition(".")[0])
    return not text_path or name.startswith(f"{text_path}.") or owner is head


class _Images:
    """What a tower needs to look at images."""

    def __init__(self, model: nn.Module, load: Load) -> None:
        self.model, self.load = model, load
        self.config = getattr(model.config, "vision_config", None)

    def tokens_of_one(self) -> int:
        """Patches of one picture, or of all tiles where the tower always takes several."""
        if self.config is None:
            return 0
        height, width = _pair(getattr(self.config, "image_size", None) or self.load.image_size)
        patch_height, patch_width = _pair(getattr(self.config, "patch_size", None) or 14)
        tiles = getattr(self.config, "max_num_tiles", 1)
        return (height // patch_height * (width // patch_width) + 1) * tiles

    def workspace(self) -> int:
        """The fullest moment, with all images of all rows."""
        count = self.load.rows * self.load.images
        if self.config is None or not count:
            return 0
        if getattr(self.config, "image_size", None) is not None:
            try:
                return self._measured(count)
            except Exception:  # towers that take more than pixels, or sizes as values
                pass
        return self._estimated(count)

    def _measured(self, count: int) -> int:
        height, width = _pair(self.config.image_size)
        channels = getattr(self.config, "num_channels", 3)
        watch = PeakBytes(torch.device("meta"))
        with on_meta(watch):
            pixels = torch.empty(count, channels, height, width, dtype=self.model.dtype)
            held = (pixels, self.model.get_image_features(pixel_values=pixels))
        del held
        return watch.peak

    def _estimated(self, count: int) -> int:
        """All that the linear layers of the widest block take and give, as if at once."""
        text_path = text_model_path(self.model)
        widths = [
            _width(block)
            for name, blocks in self.model.named_modules()
            if isinstance(blocks, nn.ModuleList) and not name.startswith(f"{text_path}.")
            for block in blocks
        ]
        numbers = self.tokens_of_one() * max(widths, default=0)
        return count * numbers * self.model.dtype.itemsize


def _width(block: nn.Module) -> int:
    return sum(sum(p.shape[-2:]) for p in block.parameters() if p.dim() == 2)


def _pair(size: object) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (int(size),) * 2
