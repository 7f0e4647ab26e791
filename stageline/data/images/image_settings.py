"""How a run takes images: its limits and its cache. Plain values, for dataset and processor alike.

Datasets find them while they are made (`using_images`), an `ImageExpander` is given them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.data.images.image_cache import ImageCache

MAX_PIXELS = 50_000_000  # 150 MB in RGB; a camera's largest common picture


@dataclass(frozen=True)
class ImageSettings:
    """Limits and cache of images."""

    max_pixels: int = MAX_PIXELS  # of one image; a larger one is refused before it is decoded
    max_images: int | None = None  # of one sample; None: any number
    cache: ImageCache | None = None  # keeps what the processor makes of files


def make_image_settings(
    *, max_pixels: int, max_images: int | None, cache_folder: str | None, cache_gib: float
) -> ImageSettings:
    """The settings; makes the folder of the cache, if there is to be one."""
    cache = None
    if cache_folder is not None:
        from stageline.data.images.image_cache import ImageCache  # late: it needs torch

        cache = ImageCache(cache_folder, max_bytes=int(cache_gib * 2**30))
    return ImageSettings(max_pixels, max_images, cache)


_DEFAULT = ImageSettings()
_current: ContextVar[ImageSettings] = ContextVar("image_settings", default=_DEFAULT)


def current_image_settings() -> ImageSettings:
    """Those of `using_images`, or the defaults."""
    return _current.get()


@contextlib.contextmanager
def using_images(settings: ImageSettings) -> Iterator[ImageSettings]:
    """Lets the datasets that are made within use these settings from then on."""
    token = _current.set(settings)
    try:
        yield settings
    finally:
        _current.reset(token)
