"""A micro-batch with pictures for any vision-language model, without its processor.

What a tower takes is told by the parameters of its `get_image_features`, and by the fields of its
configuration; pictures are as small as they can be. Used where a model is tried before there is
data: in the rehearsal of a split, in the sweep over all families, and where a replica without a
picture does the work of one.

Shapes: N pictures, R rows of a micro-batch, T tokens, P patches, C channels, H and W pixels.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig

from stageline.errors import UserError
from stageline.special_tokens import special_tokens
from stageline.stages.picture_layouts import Batch, Order, picture_layouts

TEXT_IDS = 1000  # text is written in the first tokens of a vocabulary
# model type and tower -> what it takes, and which of the layouts it took: found by one that has the
# model, used where there is none
_KNOWN: dict[str, tuple[frozenset[str], int]] = {}
TOKENS_BETWEEN = 3  # of text, before and after each picture
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
    """What a tower takes for some small pictures; the second of two has another size if it may.

    Args:
        whole: the model; without it the likeliest layout is given, untried.
        rows: pictures of each row; some families keep pictures by row.
        generator: draws pixels; None: they are all ones, because zeros may stand for no picture.

    Returns:
        Pixels and what belongs to them; None: it is not known what this model takes.
    """

    def fill(*shape: int) -> torch.Tensor:
        if generator is None:
            return torch.ones(1, dtype=dtype, device=device).expand(shape)
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    order = Order(config, rows, fill, torch.device(device))
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
    device: torch.device | str = "cpu",
    seed: int = 0,
    longer: int = 0,
) -> Batch:
    """One micro-batch: ids [R, T], mask, token types, and pixels where `rows` has pictures.

    Args:
        rows: pictures of each row; rows are padded on the right to the longest.
        longer: tokens of text that are added to each row.

    Raises:
        UserError: it is not known what pictures this model takes.
    """
    generator = torch.Generator().manual_seed(seed)
    pictures, counts = {}, []
    if any(rows):
        found = example_pictures(
            config, whole, rows=rows, dtype=dtype, device=device, generator=generator
        )
        if found is None:
            raise UserError(
                f"No pictures could be made for {config.model_type}: its tower takes "
                f"{', '.join(sorted(_parameters(config, whole))) or 'nothing that has a name'}. "
                "One of the layouts in stageline/stages/example_batch.py was expected: add it."
            )
        pictures, counts = found, image_tokens(config, whole, found, rows)
        if image_token(config) is None:
            raise UserError(
                f"The configuration of {config.model_type} names no token for a picture; one was "
                "expected in image_token_id, because the text must say where pictures are. Set it."
            )
    writer = _Writer(config, generator)
    left = iter(counts)
    lines = [writer.row([next(left) for _ in range(count)], longer) for count in rows]
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None) or 0
    ids = pad_sequence(lines, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": mask, **_token_types(config, whole, ids, mask)}
    batch = {name: value.to(device) for name, value in batch.items()}
    return batch | pictures | _by_token(whole, pictures, batch, rows)


# -- what a model takes -------------------------------------------------------------------------


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


def image_tokens(
    config: PretrainedConfig, whole: nn.Module, pictures: Batch, rows: Sequence[int]
) -> list[int]:
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


# -- text around pictures -----------------------------------------------------------------------


class _Writer:
    """Writes rows of random text with places for pictures."""

    def __init__(self, config: PretrainedConfig, generator: torch.Generator) -> None:
        text = config.get_text_config(decoder=True)
        special = special_tokens(config)
        offset = getattr(getattr(config, "vision_config", None), "vocab_offset", None)
        known = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
        most = min(offset or known, known, TEXT_IDS)
        self.letters = torch.tensor([one for one in range(3, most) if one not in special])
        self.generator = generator
        self.image = image_token(config)
        self.start, self.end = (
            next((o for n in names if isinstance(o := getattr(config, n, None), int)), None)
            for names in (STARTS, ENDS)
        )
        if max(self.start or 0, self.end or 0) >= text.vocab_size:
            self.start = self.end = None  # left over from a larger vocabulary

    def row(self, pictures: Sequence[int], longer: int) -> torch.Tensor:
        """[T]: text, and after it each picture with text behind."""
        pieces = [self.text(TOKENS_BETWEEN + longer)]
        for count in pictures:
            ids = [self.image] * count
            ids = [one for one in (self.start, *ids, self.end) if one is not None]
            pieces += [torch.tensor(ids), self.text(TOKENS_BETWEEN)]
        return torch.cat(pieces)

    def text(self, length: int) -> torch.Tensor:
        places = torch.randint(len(self.letters), (length,), generator=self.generator)
        return self.letters[places]


def image_token(config: PretrainedConfig) -> int | None:
    """The token that stands where features of a picture go; None: the model has none."""
    return _token(config, ("image_token_id", "image_token_index", "image_patch_id", "im_patch_id"))


def _token(config: PretrainedConfig, names: Sequence[str]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _token_types(
    config: PretrainedConfig, whole: nn.Module, ids: torch.Tensor, mask: torch.Tensor
) -> Batch:
    """Which tokens are pictures, under the names that the model's forward takes."""
    names = inspect.signature(type(whole).forward).parameters
    token = image_token(config)
    is_picture = torch.zeros_like(ids) if token is None else (ids == token).long()
    types = {n: is_picture for n in ("mm_token_type_ids", "moe_mm_token_type_ids") if n in names}
    if "token_type_ids" in names:
        text = config.get_text_config(decoder=True)
        # where a prefix is read in both directions, ones stand for the answer after it
        reads_both_ways = getattr(text, "use_bidirectional_attention", None) is True
        types["token_type_ids"] = (1 - is_picture) * mask if reads_both_ways else is_picture
    return types


def _by_token(whole: nn.Module, pictures: Batch, batch: Batch, rows: Sequence[int]) -> Batch:
    """What says for each token which pictures it sees, in models whose layers attend to them."""
    names = inspect.signature(type(whole).forward).parameters
    if "cross_attention_mask" not in names or "aspect_ratio_mask" not in pictures:
        return {}
    ids, tiles = batch["input_ids"], pictures["aspect_ratio_mask"]
    seen = torch.zeros(*ids.shape, *tiles.shape[1:], dtype=torch.long, device=ids.device)
    for row, count in enumerate(rows):
        places = (ids[row] == image_token(whole.config)).nonzero().flatten().tolist()
        for picture, place in zip(range(count), places):
            seen[row, place:, picture] = tiles[row, picture]
    return {"cross_attention_mask": seen}
