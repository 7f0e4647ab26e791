"""Limits on the tiles or the pixels that a processor makes of an image.

One place knows how each kind of image processor spells it. The processor itself is changed, so
that one that is saved with a model does the same.
"""

import math
from dataclasses import dataclass
from typing import Any

from stageline.data.images.image_files import ImageSettings
from stageline.data.images.images import ImageExpander
from stageline.data.text.processor import get_image_processor, get_tokenizer
from stageline.errors import UserError


@dataclass(frozen=True)
class Tiling:
    """Tiles of an image, a thumbnail not counted, and pixels; None: the processor's own."""

    min_tiles: int | None = None
    max_tiles: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __str__(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"`{name}` {value}" for name, value in given.items())


def apply_tiling(processor: Any, tiling: Tiling) -> None:
    """Change the image processor of a processor, in place."""
    if tiling == Tiling():
        return
    images = get_image_processor(processor)

    def has(*names: str) -> bool:
        return all(hasattr(images, name) for name in names)

    # its settings tell its kind
    if images is None:
        raise _refusal(tiling, processor, "takes no images")
    if has("crop_to_patches", "min_patches", "max_patches"):  # InternVL, GOT-OCR2, Ovis2
        own = (images.min_patches, images.max_patches)
        images.min_patches, images.max_patches = _bounds(tiling, processor, "tiles", own)
        images.crop_to_patches = images.max_patches > 1
    elif has("image_grid_pinpoints"):  # LLaVA-Next and LLaVA-OneVision: some of its grids stay
        sizes = [*dict(images.crop_size or {}).values(), *dict(images.size).values()]
        side = next(size for size in sizes if size)
        tiles = {(h, w): (h // side) * (w // side) for h, w in images.image_grid_pinpoints}
        low, high = _bounds(tiling, processor, "tiles", (min(tiles.values()), max(tiles.values())))
        kept = [list(grid) for grid, count in tiles.items() if low <= count <= high]
        if not kept:
            why = f"has grids of {', '.join(map(str, sorted(set(tiles.values()))))} tiles"
            raise _refusal(tiling, processor, why)
        images.image_grid_pinpoints = kept
    elif has("do_image_splitting", "max_image_size"):  # Idefics3 and SmolVLM: the longest edge,
        if tiling.min_tiles is not None:  # in tiles, so that its square is not too many
            raise _refusal(tiling, processor, "has no least number of tiles")
        _, most = _bounds(tiling, processor, "tiles", (1, 1))
        edge = math.isqrt(most)
        vocabulary = get_tokenizer(processor).get_vocab()
        while edge > 1 and f"<row_{edge}_col_{edge}>" not in vocabulary:
            edge -= 1
        longest = edge * images.max_image_size["longest_edge"]
        images.size = type(images.size)(longest_edge=longest)
    elif type(images).__name__.startswith("Qwen2VL"):  # no tiles: patches follow from the pixels
        own = (images.size["shortest_edge"], images.size["longest_edge"])
        low, high = _bounds(tiling, processor, "pixels", own)
        least = (images.patch_size * images.merge_size) ** 2
        if high < least:
            raise _refusal(tiling, processor, f"makes one token of {least} pixels")
        images.size = type(images.size)(shortest_edge=low, longest_edge=high)
    else:
        why = "makes of every image the same number of tiles, or decides it by itself"
        raise _refusal(tiling, processor, why)


def match_config(config: Any, processor: Any) -> None:
    """Give a model's config the grids of its processor: LLaVA-Next's works them out again."""
    grids = getattr(get_image_processor(processor), "image_grid_pinpoints", None)
    if grids is not None and hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = [list(grid) for grid in grids]


def _refusal(tiling: Tiling, processor: Any, why: str) -> UserError:
    name = type(get_image_processor(processor) or processor).__name__
    return UserError(f"{tiling} does not fit {name}, which {why}. Change the option or drop it.")


def _bounds(tiling: Tiling, processor: Any, kind: str, own: tuple[int, int]) -> tuple[int, int]:
    """Return both limits, in tiles or pixels; one that was not given is the processor's own."""
    other = {"tiles": "pixels", "pixels": "tiles"}[kind]
    if (getattr(tiling, f"min_{other}"), getattr(tiling, f"max_{other}")) != (None, None):
        why = f"takes limits in {kind}: `min_{kind}`, `max_{kind}`"
        raise _refusal(tiling, processor, why)
    low, high = getattr(tiling, f"min_{kind}"), getattr(tiling, f"max_{kind}")
    low, high = own[0] if low is None else low, own[1] if high is None else high
    if low > high:
        why = f"has from {own[0]} to {own[1]} {kind} of itself: give `min_{kind}` and `max_{kind}`"
        raise _refusal(tiling, processor, why)
    return low, high


def prepare_images(processor: Any, settings: ImageSettings, tiling: Tiling) -> None:
    """Change the processor in place; one without images is left alone."""
    apply_tiling(processor, tiling)
    expander = ImageExpander.of(processor)
    if expander is not None:
        expander.use(settings)
