"""Limits of images in a run: plain values, for dataset and processor alike.

Datasets find them while they are made (`using_images`), an `ImageExpander` is given them.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

MAX_PIXELS = 50_000_000  # 150 MB in RGB; a camera's largest common picture


@dataclass(frozen=True)
class ImageSettings:
    """Limits of images."""

    max_pixels: int = MAX_PIXELS  # limit of one image; a larger one is refused before decoding
    max_images: int | None = None  # limit of one sample; None: any number


_DEFAULT = ImageSettings()
_current: ContextVar[ImageSettings] = ContextVar("image_settings", default=_DEFAULT)


def current_image_settings() -> ImageSettings:
    """Return the settings of `using_images`, or the defaults."""
    return _current.get()


@contextlib.contextmanager
def using_images(settings: ImageSettings) -> Iterator[ImageSettings]:
    """Make the datasets that are created within use these settings from then on."""
    token = _current.set(settings)
    try:
        yield settings
    finally:
        _current.reset(token)
