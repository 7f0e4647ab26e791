"""The pixels of a batch, of which those of known files come from an image cache."""

import hashlib
import importlib.metadata
import json
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, features

from stageline.data.image_cache import ImageCache
from stageline.data.image_layout import LAYOUTS, Layout, Pixels, find_layout, is_equal, join_pixels
from stageline.data.picture_file import PictureFile

Decode = Callable[..., Image.Image]
Process = Callable[[Sequence[Sequence[Any]]], dict[str, torch.Tensor]]


class KeptPixels:
    """Processes images one by one, and keeps what was made of files.

    Only a picture that nobody has drawn on, turned or scaled since its file was opened is looked
    up. The first one that is found is processed all the same, and compared.

    Args:
        process: rows of decoded images -> the processor's inputs for them.
        settings: all that decides what it makes of them.
    """

    def __init__(self, cache: ImageCache, process: Process, *, settings: dict[str, Any]) -> None:
        self.cache = cache
        self._process = process
        text = json.dumps(settings, sort_keys=True, default=str)
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        file = cache.folder / f"processor-{self._key}.json"
        self._layout = _known_layout(file, settings, self._pixels)
        if self._layout is None:
            warnings.warn(
                f"--image-cache does nothing here: {settings.get('processor')} joins images to a "
                "batch in a way of its own, so those of single files cannot be kept",
                stacklevel=2,
            )
        self._is_compared = False

    @property
    def is_usable(self) -> bool:
        """Whether images may be processed one by one."""
        return self._layout is not None

    def __call__(
        self, images: Sequence[Sequence[Any]], names: Sequence[str], decode: Decode
    ) -> Pixels:
        """The pixels of a batch.

        Args:
            images: of each row; some row has one.
            names: of each row, for errors.
            decode: (image, name) -> its pixels.
        """
        assert self._layout is not None
        rows = [
            [self._one(image, name, decode) for image in row]
            for row, name in zip(images, names, strict=True)
        ]
        return join_pixels(rows, self._layout)

    def _one(self, image: Any, name: str, decode: Decode) -> Pixels:
        if not isinstance(image, PictureFile) or not image.is_untouched:
            return self._pixels([[decode(image, name=name)]])
        image = image.with_digest()
        digest = image.facts.digest
        entry = f"{digest}-{self._key}" if digest else None
        found = self.cache.get(entry) if entry else None
        if found is not None and self._is_compared:
            return found
        made = self._pixels([[decode(image, name=name)]])
        if found is not None:
            self._compare(found, made, image)
        elif entry:
            self.cache.put(entry, made)
        return made

    def _compare(self, found: Pixels, made: Pixels, image: PictureFile) -> None:
        self._is_compared = is_equal(found, made)
        if not self._is_compared:
            warnings.warn(
                f"the image cache {self.cache.folder} has other pixels of {image.filename} than "
                "were made of it now, so none of them is used: empty the folder",
                stacklevel=2,
            )
            self.cache.ignore()

    def _pixels(self, images: Sequence[Sequence[Any]]) -> Pixels:
        made = self._process(images)
        return {name: value for name, value in made.items() if name.startswith("pixel")}


def processor_settings(processor: Any) -> dict[str, Any]:
    """What decides the pixels that a processor makes: its options, and who computes them."""
    images = processor.image_processor
    settings = images.to_dict() if hasattr(images, "to_dict") else vars(images)
    return {
        "processor": type(processor).__name__,
        "image processor": type(images).__name__,
        "settings": settings,
        "versions": {name: _version(name) for name in ("transformers", "pillow", "torchvision")},
        "jpeg": features.version("libjpeg_turbo") or features.version("jpg"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _known_layout(file: Path, settings: dict[str, Any], process: Process) -> Layout | None:
    """The layout of a processor as an earlier process found it, or found now."""
    try:
        layout = json.loads(file.read_text(encoding="utf-8"))["layout"]
        if layout in (None, *LAYOUTS):
            return layout
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged
    layout = find_layout(process)
    try:
        unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
        text = json.dumps({"layout": layout, **settings}, indent=1, default=str)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        pass  # the cache tells of it
    return layout
