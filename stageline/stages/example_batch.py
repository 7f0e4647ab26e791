"""A micro-batch with pictures for any vision-language model, without its processor.

What a tower takes is told by the parameters of its `get_image_features`, and by the fields of its
configuration; pictures are as small as they can be.

Shapes: N pictures, R rows of a micro-batch, T tokens, P patches, C channels, H and W pixels.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

from stageline.errors import UserError
from stageline.model_folder import special_tokens

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PictureOrder:
    """The number of example pictures of each row, with their pixels and device."""

    config: PretrainedConfig
    rows: Sequence[int]
    fill: Callable[..., torch.Tensor]
    device: torch.device

    @property
    def vision(self) -> PretrainedConfig:
        return getattr(self.config, "vision_config", self.config)

    @property
    def channels(self) -> int:
        names = ("in_channels", "in_chans", "num_channels")
        return next((getattr(self.vision, n) for n in names if hasattr(self.vision, n)), 3)

    def integers(self, values: object, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [R, most pictures of a row, ...]; zeros where a row has fewer."""
        places = values.new_zeros((len(self.rows), max(self.rows), *values.shape[1:]))
        for place, own in zip(places, values.split(list(self.rows)), strict=True):
            place[: len(own)] = own
        return places


def picture_layouts(order: PictureOrder, names: frozenset[str]) -> Iterator[Batch]:
    """Layouts of pictures that fit the names of what a tower takes, the likeliest first."""
    config, vision, fill, count = order.config, order.vision, order.fill, sum(order.rows)
    channels, integers, in_rows = order.channels, order.integers, order.in_rows
    wide = [1 + index % 2 for index in range(count)]  # every second picture is twice as wide
    side = side_of(getattr(vision, "patch_size", None) or 0)
    # patches of a side that become one token
    sides = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    merge = side_of(next((getattr(vision, name) for name in sides if hasattr(vision, name)), 1))
    has_grid = hasattr(vision, "spatial_merge_size") and hasattr(vision, "temporal_patch_size")
    if "image_grid_thw" in names or (has_grid and not names):
        # all patches of all pictures in one row: [P, numbers of a patch]
        frames = getattr(vision, "temporal_patch_size", 1) or 1
        frames = getattr(vision, "patch_temporal", frames) or 1
        grid = [[1, merge, merge * width] for width in wide]
        num_patches = sum(height * width for _, height, width in grid)
        rest = {"image_grid_thw": integers(grid)}
        if "image_merge_sizes" in names:
            rest["image_merge_sizes"] = integers([merge] * count)
        for shape in (
            (channels * frames * side**2,),
            (channels, side, side),
            (channels, frames, side, side),
            (channels * side**2,),
        ):
            yield {"pixel_values": fill(num_patches, *shape), **rest}
        # the grid counts merged patches
        pixels = fill(sum(wide), side * merge, side * merge, channels)
        merged = integers([[1, 1, width] for width in wide])
        yield {"pixel_values": pixels, "image_grid_thw": merged}
    elif "spatial_shapes" in names:
        # patches of each picture in a row of their own, padded: [N, P, numbers of a patch]
        factor = getattr(config, "downsample_factor", 2)
        shapes = [[factor, factor * width] for width in wide]
        longest = max(height * width for height, width in shapes)
        real = [[int(at < height * width) for at in range(longest)] for height, width in shapes]
        yield {
            "pixel_values": fill(count, longest, channels * side**2),
            "spatial_shapes": integers(shapes),
            "pixel_attention_mask": integers(real),
        }
    elif "image_position_ids" in names:
        # patches with their places: [N, P, numbers of a patch] and [N, P, 2]
        pool = getattr(vision, "pooling_kernel_size", 1) or 1
        places = [[column, row] for row in range(pool) for column in range(pool * 2)]
        positions = integers([places] * count)
        for numbers in (3 * side**2, 3 * (side * pool) ** 2):
            pixels = fill(count, len(places), numbers)
            yield {"pixel_values": pixels, "image_position_ids": positions}
    elif "target_sizes" in names:
        # patches of a picture side by side: [1, C, side of a patch, P times that]
        for factor in (4, 8, 16):
            longest = sum(factor * factor * width for width in wide)
            pixels = fill(1, channels, side, longest * side)
            sizes = integers([[factor, factor * width] for width in wide])
            yield {"pixel_values": pixels, "target_sizes": sizes}
    elif "image_grid_hw" in names:
        num_patches, sizes = sum(4 * width for width in wide), integers([[2, 2 * w] for w in wide])
        for shape in ((channels * side**2,), (channels, side, side)):
            yield {"pixel_values": fill(num_patches, *shape), "image_grid_hw": sizes}
            yield {"pixel_values": fill(1, num_patches, *shape), "image_grid_hw": sizes}
    elif "pixel_attention_mask" in names:
        # by row, padded with pictures of zeros: [R, pictures of a row, C, H, W]
        factor = getattr(config, "scale_factor", None) or getattr(vision, "scale_factor", None)
        for size in (*([side * factor] if isinstance(factor, int) else []), None):
            size = size or side_of(vision.image_size)
            pixels = fill(count, channels, size, size)
            mask = torch.ones(count, size, size, dtype=torch.bool, device=order.device)
            yield {"pixel_values": in_rows(pixels), "pixel_attention_mask": in_rows(mask)}
        # the last size again, and a mask of whole pictures
        yield {"pixel_values": in_rows(pixels), "pixel_attention_mask": in_rows(mask[:, 0, 0])}
    elif "aspect_ratio_ids" in names:
        # Mllama: pictures of one tile by row: [R, pictures of a row, tiles, C, H, W]
        tiles, (height, width) = vision.max_num_tiles, _size(vision.image_size)
        ones = torch.ones(count, dtype=torch.long, device=order.device)
        first = torch.eye(1, tiles, device=order.device).long().expand(count, -1)
        yield {
            "pixel_values": in_rows(fill(count, tiles, channels, height, width)),
            "aspect_ratio_ids": in_rows(ones),
            "aspect_ratio_mask": in_rows(first),
        }
    elif getattr(config, "image_grid_pinpoints", None):
        # LLaVA-NeXT: tiles of each picture, as many as its size asks for: [N, tiles, C, H, W]
        height, width = _size(vision.image_size)
        # more tiles than are taken do no harm
        most = max(1 + (h // height) * (w // width) for h, w in config.image_grid_pinpoints)
        pixels = fill(count, most, channels, height, width)
        sizes = integers([[height, width * factor] for factor in wide])
        yield {"pixel_values": pixels, "image_sizes": sizes}
    elif "image_sizes" in names and getattr(vision, "model_type", "") == "pixtral":
        # pictures padded to the largest, and their sizes: [N, C, H, W]
        side *= getattr(config, "spatial_merge_size", 1) or 1
        # the first one has two tokens: transformers squeezes a single token away
        widths = [side * (3 - factor) for factor in wide]
        pixels = fill(count, channels, side, max(widths))
        yield {"pixel_values": pixels, "image_sizes": integers([[side, w] for w in widths])}
    yield from _whole_pictures(order, names)


def _whole_pictures(order: PictureOrder, names: frozenset[str]) -> Iterator[Batch]:
    """Pictures of the one size that the tower takes: [N, C, H, W]."""
    vision, fill, count = order.vision, order.fill, sum(order.rows)
    places = (vision, getattr(vision, "sam_config", None), order.config)
    size = next((o for one in places if (o := getattr(one, "image_size", None))), None)
    if size is None or not (hasattr(vision, "hidden_size") or hasattr(vision, "sam_config")):
        # patches for a tower that is one projection, or that folds each patch into one token
        tokens = getattr(order.config, "vision_soft_tokens_per_image", None)
        if tokens is not None:  # the size is that of timm: 48 pixels a token each way
            side = 48 * int(tokens**0.5)
            yield {"pixel_values": fill(count, 3, side, side)}
        if hasattr(vision, "patch_size"):
            side, frames = side_of(vision.patch_size), getattr(vision, "temporal_patch_size", 1)
            yield {"pixel_values": fill(count, 4, order.channels * side**2)}
            yield {"pixel_values": fill(count, frames, side, side, order.channels)}
        return
    height, width = _size(size)
    pictures = {"pixel_values": fill(count, order.channels, height, width)}
    high = getattr(order.config, "high_res_vision_config", None)
    if "high_res_pixel_values" in names and high is not None:
        sides = _size(high.image_size)
        pictures["high_res_pixel_values"] = fill(count, order.channels, *sides)
    if "image_sizes" in names:
        yield pictures | {"image_sizes": order.integers([[height, width]] * count)}
    yield pictures


def side_of(size: int | Sequence[int]) -> int:
    """Return a side, or the first of two equal ones."""
    return size if isinstance(size, int) else size[0]


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


TEXT_IDS = 1000  # text is written in the first tokens of a vocabulary
# model type and tower -> what it takes, and which of the layouts it took: found by one that has the
# model, used where there is none
_KNOWN: dict[str, tuple[frozenset[str], int]] = {}
TOKENS_BETWEEN = 3  # tokens of text before and after each picture
STARTS = ("vision_start_token_id", "image_start_token_id", "image_start_id", "boi_token_id")
ENDS = ("vision_end_token_id", "image_end_token_id", "image_end_id", "eoi_token_id")


def example_pictures(
    config: PretrainedConfig,
    whole: nn.Module | None = None,
    *,
    rows: Sequence[int] = (1,),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Batch | None:
    """Return a tower's inputs for small pictures; None: it is not known what this model takes.

    Args:
        whole: the model; without it the likeliest layout is given, untried.
        rows: pictures of each row; some families keep pictures by row.
        generator: draws pixels; None: they are all ones, because zeros may stand for no picture.
    """

    def fill(*shape: int) -> torch.Tensor:
        if generator is None:
            return torch.ones(1, dtype=dtype, device=device).expand(shape)
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    order = PictureOrder(config, rows, fill, torch.device(device))
    key = f"{config.model_type} {order.vision.to_json_string(use_diff=False)}"
    names, place = _KNOWN.get(key) or (_parameters(config, whole), None)
    for index, layout in enumerate(picture_layouts(order, names)):
        if place is not None and index != place:
            continue
        if place is not None or whole is None or _features_reader(whole) is None:
            return layout
        try:
            image_rows(whole, layout)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            continue  # it takes another layout
        _KNOWN[key] = names, index
        return layout
    return None


def picture_batch(
    config: PretrainedConfig,
    whole: nn.Module,
    *,
    rows: Sequence[int] = (2, 0, 1),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    longer: int = 0,
) -> Batch:
    """One micro-batch: ids [R, T], mask, token types, and pixels where `rows` has pictures.

    Args:
        rows: pictures of each row; rows are padded on the right to the longest.
        longer: tokens of text that are added to each row.
    """
    generator = torch.Generator().manual_seed(seed)
    pictures, counts = {}, []
    if any(rows):
        found = example_pictures(config, whole, rows=rows, dtype=dtype, generator=generator)
        if found is None:
            raise UserError(
                f"No pictures could be made for {config.model_type}: its tower takes "
                f"{', '.join(sorted(_parameters(config, whole))) or 'nothing that has a name'}. "
                "Add a layout to stageline/stages/example_batch.py."
            )
        pictures, counts = found, image_tokens(whole, found, rows)
        if image_token(config) is None:
            raise UserError(
                f"The configuration of {config.model_type} names no token for a picture. Set "
                "image_token_id."
            )
    text = config.get_text_config(decoder=True)
    known = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    offset = getattr(getattr(config, "vision_config", None), "vocab_offset", None)
    special, most = special_tokens(config), min(offset or known, known, TEXT_IDS)
    letters = torch.tensor([one for one in range(3, most) if one not in special])

    def written(length: int) -> torch.Tensor:
        return letters[torch.randint(len(letters), (length,), generator=generator)]

    start, end = (
        next((o for n in names if isinstance(o := getattr(config, n, None), int)), None)
        for names in (STARTS, ENDS)
    )
    if max(start or 0, end or 0) >= text.vocab_size:
        start = end = None  # left over from a larger vocabulary
    token, left, lines = image_token(config), iter(counts), []
    for count in rows:  # text, and after it each picture with text behind
        pieces = [written(TOKENS_BETWEEN + longer)]
        for _ in range(count):
            shown = [one for one in (start, *[token] * next(left), end) if one is not None]
            pieces += [torch.tensor(shown), written(TOKENS_BETWEEN)]
        lines.append(torch.cat(pieces))
    ids = pad_sequence(lines, batch_first=True, padding_value=getattr(text, "pad_token_id", 0) or 0)
    mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": mask}
    # which tokens are pictures, under the names that the model's forward takes
    names = inspect.signature(type(whole).forward).parameters
    is_picture = torch.zeros_like(ids) if token is None else (ids == token).long()
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
        if name in names:
            batch[name] = is_picture
    if "token_type_ids" in batch and getattr(text, "use_bidirectional_attention", None) is True:
        batch["token_type_ids"] = (1 - is_picture) * mask  # ones stand for the answer behind
    if "cross_attention_mask" in names and "aspect_ratio_mask" in pictures:
        # which pictures each token sees, in models whose layers attend to them
        tiles = pictures["aspect_ratio_mask"]
        seen = torch.zeros(*ids.shape, *tiles.shape[1:], dtype=torch.long)
        for row, count in enumerate(rows):
            places = is_picture[row].nonzero().flatten().tolist()
            for picture, place in zip(range(count), places):
                seen[row, place:, picture] = tiles[row, picture]
        pictures = {**pictures, "cross_attention_mask": seen}
    return batch | pictures


def _features_reader(whole: nn.Module) -> Callable[..., Any] | None:
    base = getattr(whole, "base_model", whole)
    return getattr(base, "get_image_features", None) or getattr(whole, "get_image_features", None)


def _parameters(config: PretrainedConfig, whole: nn.Module | None) -> frozenset[str]:
    """Names of what tower and projector take."""
    reader = None if whole is None else _features_reader(whole)
    if reader is None:
        classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        model = type(whole) if whole is not None else classes.get(type(config), None)
        reader = getattr(model, "get_image_features", None) or getattr(model, "forward", None)
    return frozenset(inspect.signature(reader).parameters) if reader else frozenset()


def image_rows(whole: nn.Module, pictures: Batch) -> list[int]:
    """Rows of features of each picture, or of each tile, as `get_image_features` gives them."""
    reader = _features_reader(whole)
    assert reader is not None  # the callers looked
    taken = inspect.signature(reader).parameters
    was_training = whole.training
    try:
        with torch.no_grad():
            found = reader(**{k: v for k, v in pictures.items() if k in taken})
    finally:
        whole.train(was_training)
    return _rows_of(found)


def _rows_of(found: Any) -> list[int]:
    """Rows of what `get_image_features` returned, in any of its forms."""
    features = getattr(found, "pooler_output", found)
    if features is None and getattr(found, "deepstack_features", None):
        features = found.deepstack_features[0][-1]  # (layer that gets them, features)
    found = found.last_hidden_state if features is None else features
    if isinstance(found, torch.Tensor):
        return [found.shape[0]] if found.ndim == 2 else [found.shape[1]] * found.shape[0]
    return [one.shape[0] if one.ndim == 2 else one.shape[0] * one.shape[1] for one in found]


def image_tokens(whole: nn.Module, pictures: Batch, rows: Sequence[int]) -> list[int]:
    """Tokens that each picture takes in the text."""
    if _features_reader(whole) is None:
        return [1] * sum(rows)  # layers attend to the pictures: one token stands for each
    counts, num_images = image_rows(whole, pictures), sum(rows)
    total, by_row = sum(counts), "pixel_attention_mask" in pictures
    if len(counts) == num_images and not (by_row and pictures["pixel_values"].ndim == 5):
        return counts
    if "image_grid_thw" in pictures:
        sizes = pictures["image_grid_thw"].prod(-1).tolist()
        return [total * size // sum(sizes) for size in sizes]
    return [total // num_images] * num_images


def image_token(config: PretrainedConfig) -> int | None:
    """The token that stands where features of a picture go; None: the model has none."""
    names = ("image_token_id", "image_token_index", "image_patch_id", "im_patch_id")
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
