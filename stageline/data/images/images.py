"""Image text and image tensors of any transformers processor, without pixels where none exist.

The tokens of an image depend on its size only. So every rank runs the processor once per distinct
size on a blank image; only the first stage decodes and processes true pixels. Shapes: B rows, T
tokens, N images of a micro-batch, M images of the fullest row, S tiles an image.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image, ImageFile, ImageOps

from stageline.data.images.image_files import (
    MAX_PIXELS,
    ImageSettings,
    bad_image,
    check_shape,
    file_of,
    has_orientation,
    is_turned,
)
from stageline.data.text.processor import get_image_processor, get_image_token, get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.errors import DataError, UserError

CROSS_MASK = "cross_attention_mask"  # which token sees which image, in layers that attend to them
TILES = "aspect_ratio_mask"
Size = tuple[int, int]  # width, height
_TEXT_INPUTS = ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids")
_TYPE_INPUTS = ("mm_token_type_ids", "token_type_ids")
# The text of an image depends only on its size; without arithmetic on pixels it is five times as
# fast to make.
_SIZE_ALONE: dict[str, Any] = {
    "do_rescale": False,
    "do_normalize": False,
    "resample": Image.Resampling.NEAREST,
}


def grow_cross_mask(mask_BTMS: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Return the mask with `count` more tokens at the end, which see what the last one sees."""
    more = mask_BTMS[:, -1:].expand(-1, count, -1, -1)
    return torch.cat([mask_BTMS, more], dim=1)


def lies_in_rows(processor: Any) -> bool:
    """Tell whether this processor lays images out by rows."""
    return CROSS_MASK in getattr(processor, "model_input_names", ())


def by_rows(
    batch: dict[str, torch.Tensor], counts: Sequence[int], *, processor: Any
) -> dict[str, torch.Tensor]:
    """Return the image inputs [B, M, ...] of a micro-batch that has them [N, ...], and the mask.

    For models whose layers attend to images (Mllama), which want images by rows. Rows and token
    places are known on every rank, so the mask of tokens is made here, without pixels.
    """
    if TILES not in batch:
        return {}
    from transformers.models.mllama import processing_mllama as library  # not for other models

    laid = {}
    for name, value_N in batch.items():
        if name.startswith(("pixel", "aspect_ratio")):
            laid[name] = value_N.new_zeros(len(counts), max(counts), *value_N.shape[1:])
            for row, images in enumerate(value_N.split(list(counts))):
                laid[name][row, : len(images)] = images
    # in transformers absent images have one tile, so that no softmax is over nothing
    laid[TILES][:, :, 0] = 1
    tiles = batch[TILES].sum(-1).split(list(counts))
    dense = library.convert_sparse_cross_attention_mask_to_dense(
        [
            library.get_cross_attention_token_mask(row, processor.image_token_id)
            for row in batch["input_ids"].tolist()
        ],
        num_tiles=[row.tolist() for row in tiles],
        max_num_tiles=batch[TILES].shape[-1],
        length=batch["input_ids"].shape[1],
    )
    return {**laid, CROSS_MASK: torch.from_numpy(dense)}


@dataclass(frozen=True)
class ImageFacts:
    """Text and side inputs of an image, which depend only on its size."""

    text: str  # the text of the image, with all its tokens
    side_inputs: dict[str, torch.Tensor]  # small and integer, dim 0 is images
    type_input: str | None  # name of the input that marks image tokens, if the model wants one
    type_of_id: dict[int, int]  # token id -> its mark; other ids have 0


class ImageExpander:
    """Asks one processor about images; use `ImageExpander.of`, which keeps one for each."""

    _known: "weakref.WeakKeyDictionary[Any, ImageExpander]" = weakref.WeakKeyDictionary()

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.image_token = get_image_token(processor)
        self.lies_in_rows = lies_in_rows(processor)
        self.settings = ImageSettings()
        self._facts: dict[Size, ImageFacts] = {}

    @classmethod
    def of(cls, processor: Any) -> "ImageExpander | None":
        """Return the expander of this processor; None for a tokenizer."""
        if get_image_processor(processor) is None:
            return None
        return cls._known.get(processor) or cls._known.setdefault(processor, cls(processor))

    def use(self, settings: ImageSettings) -> None:
        """Take limits; call it after the processor was changed, too."""
        self.settings = settings
        self._facts.clear()

    def facts(self, size: Size) -> ImageFacts:
        """Return what an image of this size becomes."""
        if size not in self._facts:
            blank = [self.image_token or ""], [[Image.new("RGB", size)]]
            try:
                output, texts = self._run(*blank, **_SIZE_ALONE)
            except (TypeError, AttributeError):  # a processor of one's own without these options
                output, texts = self._run(*blank)
            type_input: str | None = None
            type_of_id: dict[int, int] = {}
            for name in filter(output.__contains__, _TYPE_INPUTS):
                marks = zip(output["input_ids"][0], output[name][0], strict=True)
                found = {int(token_id): int(mark) for token_id, mark in marks if mark}
                if found and not type_of_id:
                    type_input, type_of_id = name, found
            self._facts[size] = ImageFacts(
                # Mllama's puts the first token of a text into each text that lacks it
                text=texts[0].replace(getattr(self.processor, "bos_token", None) or "\0", ""),
                side_inputs={
                    name: value
                    for name, value in output.items()
                    if name not in _TEXT_INPUTS and not name.startswith("pixel")
                },
                type_input=type_input,
                type_of_id=type_of_id,
            )
        return self._facts[size]

    def side_inputs(self, sizes: Sequence[Size]) -> dict[str, torch.Tensor]:
        """Return the small integer inputs of all images of a micro-batch."""
        if not sizes:
            return {}
        facts = [self.facts(size) for size in sizes]
        return {
            name: torch.cat([fact.side_inputs[name] for fact in facts])
            for name in facts[0].side_inputs
        }

    def token_types(self, input_ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the input that marks image tokens [B, T], if the model wants one."""
        facts = next(iter(self._facts.values()), None) or self.facts((64, 64))
        if facts.type_input is None:
            return {}
        types_BT = torch.zeros_like(input_ids_BT)
        for token_id, mark in facts.type_of_id.items():
            types_BT[input_ids_BT == token_id] = mark
        return {facts.type_input: types_BT}

    def own_ids(self) -> frozenset[int]:
        """Return the added tokens for images in a text: a model looks for an image behind each."""
        facts = next(iter(self._facts.values()), None) or self.facts((64, 64))
        tokenizer = get_tokenizer(self.processor)
        written = tokenizer(facts.text, add_special_tokens=False)["input_ids"]
        added = tokenizer.added_tokens_decoder
        return frozenset(facts.type_of_id).union(one for one in written if one in added)

    def pixels(self, images: Sequence[Sequence[Image.Image]]) -> dict[str, torch.Tensor]:
        """Return all image inputs of a micro-batch, from decoded RGB images, a list per row."""
        if not any(images):
            return {}
        if self.lies_in_rows:  # `by_rows` lays them out later
            images = [[image for row in images for image in row]]
        texts = [(self.image_token or "") * len(row) for row in images]
        output, _ = self._run(texts, images)
        return {name: value for name, value in output.items() if name not in _TEXT_INPUTS}

    def decode_pixels(
        self, images: Sequence[Sequence[Any]], names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return the `pixels` of images as datasets give them; `names` of rows are for errors."""
        most = self.settings.max_pixels
        rows = zip(images, names, strict=True)
        decoded = [
            [decode_image(one, name=name, max_pixels=most) for one in row] for row, name in rows
        ]
        return self.pixels(decoded)

    def _run(
        self, texts: list[str], images: Sequence[Sequence[Image.Image]], **options: Any
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the processor's output and the texts that it gave to its tokenizer."""
        recorder = _Recorder(self.processor.tokenizer)
        processor = copy.copy(self.processor)
        processor.tokenizer = recorder
        output = processor(
            text=list(texts),
            images=[list(row) for row in images],
            # ragged rows of ids stay lists, pixels become tensors
            text_kwargs={"add_special_tokens": False, "padding": False, "return_tensors": None},
            images_kwargs={"return_tensors": "pt", **options},
        )
        output = dict(output)
        if CROSS_MASK in output:  # tensors have one row: dim 0 becomes images
            del output[CROSS_MASK]
            for name, value in output.items():
                output[name] = value[0] if isinstance(value, torch.Tensor) else value
        return output, recorder.texts


class _Recorder:
    """A tokenizer that remembers the texts it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: list[str], *args: Any, **kwargs: Any) -> Any:
        self.texts = [text] if isinstance(text, str) else list(text)
        return self._tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tokenizer"], name)


def image_size(image: Image.Image) -> Size:
    """Return (width, height) as people see the image; reads the header only."""
    width, height = image.size
    return (height, width) if is_turned(image) else (width, height)


def decode_image(image: Image.Image, *, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the first frame's pixels in RGB, upright. Raises as `check_image`."""
    check_image(image, name=name, max_pixels=max_pixels)
    try:
        upright = ImageOps.exif_transpose(image) if has_orientation(image) else image
        if upright.mode.startswith("I;16"):  # convert() takes all above 255 for white
            upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return upright.convert("RGB")
    except Exception as error:  # decoders can raise any exception
        raise bad_image(file_of(image), error, name=name) from error


def check_image(image: Image.Image, *, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Decode an image, so that a bad one is found."""
    check_shape(image, name=name, max_pixels=max_pixels)
    if image.mode in ("I", "F"):
        raise DataError(
            f"{name}: the image {file_of(image)} has pixels of 32 bits (mode {image.mode}). Save "
            "it with 8 bits, or take the row out."
        )
    try:
        ImageFile.LOAD_TRUNCATED_IMAGES = False  # else missing pixels would be gray
        image.load()  # no draft(): a dataset that keeps its images would train on small ones
    except Exception as error:  # decoders can raise any exception
        raise bad_image(file_of(image), error, name=name) from error


def expand_images(
    rendered: Rendered, images: Sequence[Image.Image] | None, processor: Any, *, name: str
) -> Rendered:
    """Write out the tokens of all images of one sample."""
    sizes = [image_size(image) for image in images or ()]
    expander = ImageExpander.of(processor)
    if expander is not None:
        for image in images or ():
            check_shape(image, name=name, max_pixels=expander.settings.max_pixels)
        most = expander.settings.max_images
        if most is not None and len(sizes) > most:
            raise DataError(
                f"{name}: it has {len(sizes)} images; at most {most} are allowed. Take some out, "
                "or raise `images.max_count`."
            )
    if rendered.num_images != len(sizes):
        raise DataError(
            f"{name}: its text has {rendered.num_images} places for its {len(sizes)} images. "
            "Write one [IMAGE], which takes all images of a sample, or one for each into the "
            "`prompt`."
        )
    if expander is None or expander.image_token is None or not sizes:
        return rendered
    token = expander.image_token
    places = [piece.text for piece in rendered if piece.is_image]
    for text in places:
        if token not in text:
            raise UserError(
                f"{name}: the text for its image is {text!r}, without {token!r}, which "
                f"{type(processor).__name__} writes out. Use `image_token` auto."
            )
    try:
        texts = (
            text.replace(token, expander.facts(size).text, 1)
            for text, size in zip(places, sizes, strict=True)
        )
        return rendered.with_pieces(
            replace(piece, text=next(texts)) if piece.is_image else piece for piece in rendered
        )
    except ValueError as error:  # processors have limits of their own
        raise DataError(
            f"{name}: {type(expander.processor).__name__} does not take images of "
            f"{', '.join(f'{width} x {height}' for width, height in sizes)} ({error}). Scale the "
            "pictures, or take the row out."
        ) from error
