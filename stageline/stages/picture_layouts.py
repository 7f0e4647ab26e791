"""In which layout a vision tower takes small pictures, by the names of what it takes.

Shapes: N pictures, R rows of a micro-batch, P patches, C channels, H and W pixels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """What pictures are asked for.

    Attributes:
        config: of the whole model.
        rows: pictures of each row.
        fill: shape -> pixels.
        like: says device of the integers.
    """

    config: PretrainedConfig
    rows: Sequence[int]
    fill: Callable[..., torch.Tensor]
    device: torch.device

    @property
    def vision(self) -> PretrainedConfig:
        return getattr(self.config, "vision_config", self.config)

    @property
    def num_images(self) -> int:
        return sum(self.rows)

    @property
    def channels(self) -> int:
        names = ("in_channels", "in_chans", "num_channels")
        return next((getattr(self.vision, n) for n in names if hasattr(self.vision, n)), 3)

    def integers(self, values: object, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [R, most pictures of a row, ...]; zeros where a row has fewer."""
        places = values.new_zeros((len(self.rows), max(self.rows), *values.shape[1:]))
        taken = 0
        for row, count in enumerate(self.rows):
            places[row, :count] = values[taken : taken + count]
            taken += count
        return places


def picture_layouts(order: Order, names: frozenset[str]) -> Iterator[Batch]:
    """Layouts of pictures that fit the names of what a tower takes, the likeliest first."""
    vision = order.vision
    merge = _merge(vision)
    if "image_grid_thw" in names or ("grid" not in names and _has_grid(vision) and not names):
        yield from _patches_by_grid(order, merge, names)
    elif "spatial_shapes" in names:
        yield _patches_by_shape(order)
    elif "image_position_ids" in names:
        yield from _patches_by_position(order)
    elif "target_sizes" in names:
        yield from _strips(order)
    elif "image_grid_hw" in names:
        yield from _patches_by_sides(order)
    elif "pixel_attention_mask" in names:
        yield from _pictures_in_rows(order)
    elif "aspect_ratio_ids" in names:
        yield _tiles_in_rows(order)
    elif getattr(order.config, "image_grid_pinpoints", None):
        yield _tiles_by_size(order)
    elif "image_sizes" in names and getattr(vision, "model_type", "") == "pixtral":
        yield _pictures_of_sizes(order)
    yield from _whole_pictures(order, names)


def _has_grid(vision: PretrainedConfig) -> bool:
    return hasattr(vision, "spatial_merge_size") and hasattr(vision, "temporal_patch_size")


def _merge(vision: PretrainedConfig) -> int:
    """Patches of a side that become one token."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    found = next((getattr(vision, name) for name in names if hasattr(vision, name)), 1)
    return _one(found)


def _patches_by_grid(order: Order, merge: int, names: frozenset[str]) -> Iterator[Batch]:
    """All patches of all pictures in one row: [P, numbers of a patch]."""
    vision = order.vision
    side, frames = _one(vision.patch_size), getattr(vision, "temporal_patch_size", 1) or 1
    frames = getattr(vision, "patch_temporal", frames) or 1
    # 1 x 1 tokens, then 1 x 2, and so on
    grid = [[1, merge, merge * (1 + index % 2)] for index in range(order.num_images)]
    num_patches = sum(height * width for _, height, width in grid)
    rest = {"image_grid_thw": order.integers(grid)}
    if "image_merge_sizes" in names:
        rest["image_merge_sizes"] = order.integers([merge] * order.num_images)
    shapes = (
        (order.channels * frames * side**2,),
        (order.channels, side, side),
        (order.channels, frames, side, side),
        (order.channels * side**2,),
    )
    for shape in shapes:
        yield {"pixel_values": order.fill(num_patches, *shape), **rest}
    # the grid counts merged patches
    grid = [[1, 1, 1 + index % 2] for index in range(order.num_images)]
    pixels = order.fill(sum(one[2] for one in grid), side * merge, side * merge, order.channels)
    yield {"pixel_values": pixels, "image_grid_thw": order.integers(grid)}


def _patches_by_shape(order: Order) -> Batch:
    """Patches of each picture in a row of their own, padded: [N, P, numbers of a patch]."""
    side = _one(order.vision.patch_size)
    factor = getattr(order.config, "downsample_factor", 2)
    shapes = [[factor, factor * (1 + index % 2)] for index in range(order.num_images)]
    longest = max(height * width for height, width in shapes)
    pixels = order.fill(order.num_images, longest, order.channels * side**2)
    mask = [[int(at < height * width) for at in range(longest)] for height, width in shapes]
    return {
        "pixel_values": pixels,
        "spatial_shapes": order.integers(shapes),
        "pixel_attention_mask": order.integers(mask),
    }


def _patches_by_position(order: Order) -> Iterator[Batch]:
    """Patches with their places: [N, P, numbers of a patch] and [N, P, 2]."""
    vision = order.vision
    side, pool = _one(vision.patch_size), getattr(vision, "pooling_kernel_size", 1) or 1
    places = [[column, row] for row in range(pool) for column in range(pool * 2)]
    positions = order.integers([places] * order.num_images)
    for numbers in (3 * side**2, 3 * (side * pool) ** 2):
        pixels = order.fill(order.num_images, len(places), numbers)
        yield {"pixel_values": pixels, "image_position_ids": positions}


def _strips(order: Order) -> Iterator[Batch]:
    """Patches of a picture side by side: [1, C, side of a patch, P times that]."""
    side = _one(order.vision.patch_size)
    for factor in (4, 8, 16):
        sizes = [[factor, factor * (1 + index % 2)] for index in range(order.num_images)]
        longest = sum(height * width for height, width in sizes)
        pixels = order.fill(1, order.channels, side, longest * side)
        yield {"pixel_values": pixels, "target_sizes": order.integers(sizes)}


def _patches_by_sides(order: Order) -> Iterator[Batch]:
    side = _one(order.vision.patch_size)
    grid = [[2, 2 * (1 + index % 2)] for index in range(order.num_images)]
    num_patches = sum(height * width for height, width in grid)
    for shape in ((order.channels * side**2,), (order.channels, side, side)):
        sizes = order.integers(grid)
        yield {"pixel_values": order.fill(num_patches, *shape), "image_grid_hw": sizes}
        yield {"pixel_values": order.fill(1, num_patches, *shape), "image_grid_hw": sizes}


def _pictures_in_rows(order: Order) -> Iterator[Batch]:
    """Pictures by row, padded with pictures of zeros: [R, pictures of a row, C, H, W]."""
    vision = order.vision
    factor = getattr(order.config, "scale_factor", None) or getattr(vision, "scale_factor", None)
    sides = [_one(vision.patch_size) * factor] if isinstance(factor, int) else []
    for side in (*sides, _one(vision.image_size)):
        pixels = order.fill(order.num_images, order.channels, side, side)
        mask = torch.ones(pixels.shape[0], side, side, dtype=torch.bool, device=order.device)
        yield {
            "pixel_values": order.in_rows(pixels),
            "pixel_attention_mask": order.in_rows(mask),
        }
    # the last size again, and a mask of whole pictures
    yield {
        "pixel_values": order.in_rows(pixels),
        "pixel_attention_mask": order.in_rows(mask[:, 0, 0]),
    }


def _tiles_in_rows(order: Order) -> Batch:
    """Mllama: pictures of one tile by row: [R, pictures of a row, tiles, C, H, W]."""
    height, width = _size(order.vision.image_size)
    num_tiles = order.vision.max_num_tiles
    pixels = order.fill(order.num_images, num_tiles, order.channels, height, width)
    ones = torch.ones(order.num_images, dtype=torch.long, device=order.device)
    first = torch.eye(1, num_tiles, device=order.device).long().expand(order.num_images, -1)
    return {
        "pixel_values": order.in_rows(pixels),
        "aspect_ratio_ids": order.in_rows(ones),
        "aspect_ratio_mask": order.in_rows(first),
    }


def _tiles_by_size(order: Order) -> Batch:
    """LLaVA-NeXT: tiles of each picture, as many as its size asks for: [N, tiles, C, H, W]."""
    height, width = _size(order.vision.image_size)
    tiles = [1 + (h // height) * (w // width) for h, w in order.config.image_grid_pinpoints]
    sizes = [[height, width * (1 + index % 2)] for index in range(order.num_images)]
    # more tiles than are taken do no harm
    pixels = order.fill(order.num_images, max(tiles), order.channels, height, width)
    return {"pixel_values": pixels, "image_sizes": order.integers(sizes)}


def _pictures_of_sizes(order: Order) -> Batch:
    """Pixtral: pictures padded to the largest, and their sizes: [N, C, H, W]."""
    side = _one(order.vision.patch_size) * (getattr(order.config, "spatial_merge_size", 1) or 1)
    sizes = [[side, side * (1 + index % 2)] for index in range(order.num_images)]
    widest = max(width for _, width in sizes)
    pixels = order.fill(order.num_images, order.channels, side, widest)
    return {"pixel_values": pixels, "image_sizes": order.integers(sizes)}


def _whole_pictures(order: Order, names: frozenset[str]) -> Iterator[Batch]:
    """Pictures of the one size that the tower takes: [N, C, H, W]."""
    vision = order.vision
    places = (vision, getattr(vision, "sam_config", None), order.config)
    size = next((o for one in places if (o := getattr(one, "image_size", None))), None)
    if size is None or not (hasattr(vision, "hidden_size") or hasattr(vision, "sam_config")):
        yield from _bare_patches(order)
        return
    height, width = _size(size)
    pictures = {"pixel_values": order.fill(order.num_images, order.channels, height, width)}
    high = getattr(order.config, "high_res_vision_config", None)
    if "high_res_pixel_values" in names and high is not None:
        sides = _size(high.image_size)
        pictures["high_res_pixel_values"] = order.fill(order.num_images, order.channels, *sides)
    if "image_sizes" in names:
        yield pictures | {"image_sizes": order.integers([[height, width]] * order.num_images)}
    yield pictures


def _bare_patches(order: Order) -> Iterator[Batch]:
    """Patches for a tower that is one projection, or that folds each patch into one token."""
    vision = order.vision
    tokens = getattr(order.config, "vision_soft_tokens_per_image", None)
    if tokens is not None:  # the size is the other library's: 48 pixels a token in each direction
        side = 48 * int(tokens**0.5)
        yield {"pixel_values": order.fill(order.num_images, 3, side, side)}
    if not hasattr(vision, "patch_size"):
        return
    side, frames = _one(vision.patch_size), getattr(vision, "temporal_patch_size", 1)
    yield {"pixel_values": order.fill(order.num_images, 4, order.channels * side**2)}
    yield {"pixel_values": order.fill(order.num_images, frames, side, side, order.channels)}


def _one(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
