"""A picture in a file that is opened only when more is asked of it than its size and kind."""

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

from PIL import Image

from stageline.data.images.image_index import FileFacts, ImageIndex, file_key
from stageline.data.images.image_settings import MAX_PIXELS
from stageline.errors import DataError

# others have decoders that few people use and many have broken
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_ASPECT = 200  # of the longer side to the shorter; what Qwen's processors take
_ORIENTATION = 0x0112  # EXIF
_HAS_ORIENTATION = ("JPEG", "MPO")


class PictureFile(Image.Image):
    """One image of a file, to be used as any image of Pillow's.

    Args:
        path: the file.
        key: of its state, as `file_key` makes it.
        facts: what is known of it.
        index: learns more about it.
        opened: it, where it is open already.
        content: its bytes, where they were read already.
    """

    def __init__(
        self,
        path: str,
        *,
        key: str,
        facts: FileFacts,
        index: ImageIndex,
        opened: Image.Image | None = None,
        content: bytes | None = None,
    ) -> None:
        self._info: dict[Any, Any] | None = None
        super().__init__()
        self._info = None  # it has set one
        self.filename = path
        self.key = key
        self.facts = facts
        self.format = facts.format
        self._mode = facts.mode
        self._size = facts.size
        self._index = index
        self._opened = opened
        self._content = content
        self._is_loaded = False

    @property
    def is_untouched(self) -> bool:
        """Nobody has asked for the pixels, so nobody has drawn on them."""
        return not self._is_loaded and self._size == self.facts.size

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as people see them."""
        width, height = self.size
        return (height, width) if self.facts.is_turned and self.is_untouched else (width, height)

    @property
    def info(self) -> dict[Any, Any]:
        """What the file says besides the pixels."""
        if self._info is None:
            self._info = self._open().info
        return self._info

    @info.setter
    def info(self, value: dict[Any, Any]) -> None:
        self._info = value

    def load(self) -> Any:
        """Decodes the pixels, once."""
        if not self._is_loaded:
            opened = self._open()
            opened.load()
            self._is_loaded = True
            self.im, self._mode, self._size = opened.im, opened.mode, opened.size
            self.palette, self.readonly = opened.palette, opened.readonly
            self._info = opened.info
            self._learn(is_whole=True)
        return super().load()

    def with_digest(self) -> "PictureFile":
        """This picture with the hash of its content, which is read if it is not known.

        What was hashed is what will be decoded. A file that cannot be read stays without.
        """
        if self.facts.digest is not None:
            return self
        try:
            with open(self.filename, "rb") as file:
                content = file.read()
        except OSError:  # decoding tells it better
            return self
        if self._opened is not None:  # for its header
            self._opened.close()
            self._opened = None
        read = PictureFile(
            self.filename, key=self.key, facts=self.facts, index=self._index, content=content
        )
        read._learn(digest=hashlib.blake2b(content, digest_size=20).hexdigest())
        return read

    def _learn(self, *, digest: str | None = None, is_whole: bool = False) -> None:
        """Remembers more of the file, if it still is what it was."""
        try:
            is_same = file_key(self.filename, os.stat(self.filename)) == self.key
        except OSError:
            return
        if is_same:
            facts = self.facts
            self.facts = replace(
                facts, digest=digest or facts.digest, is_whole=is_whole or facts.is_whole
            )
            self._index.note(self.key, self.facts)

    def getexif(self) -> Image.Exif:
        """The EXIF record of the file."""
        return self._open().getexif()

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self._opened is not None:
            self._opened.close()
        super().close()

    def __getattr__(self, name: str) -> Any:
        # what readers of one format add: n_frames, text ...
        if name.startswith("_") or name == "map":
            raise AttributeError(name)
        return getattr(self._open(), name)

    def __reduce__(self) -> tuple[Callable[..., Image.Image], tuple[Any, ...]]:
        return _plain_image, (self.__getstate__(),)

    def _open(self) -> Image.Image:
        if self._opened is None:
            opened = open_picture(
                self.filename if self._content is None else BytesIO(self._content)
            )
            if (opened.size, opened.mode) != (self.facts.size, self.facts.mode):
                opened.close()
                raise OSError("the file was changed while it was read")
            self._opened = opened
        return self._opened


def _plain_image(state: list[Any]) -> Image.Image:
    image = Image.Image()
    image.__setstate__(state)
    return image


def open_picture(path: str | Any) -> Image.Image:
    """Opens a file, or a file object, in one of `FORMATS`; decodes nothing."""
    with warnings.catch_warnings():
        # larger ones are refused by a limit of our own
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=FORMATS)


def is_turned(image: Image.Image) -> bool:
    """Whether people see width and height of an image exchanged."""
    return has_orientation(image) and image.getexif().get(_ORIENTATION, 1) >= 5


def has_orientation(image: Image.Image) -> bool:
    """Whether files of its format may say how it is to be turned."""
    return image.format in _HAS_ORIENTATION


# -- what is refused, and how that is told --------------------------------------------------------


def check_shape(image: Image.Image, *, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Refuses by the header alone: more pixels than are decoded, or the shape of a thread.

    Raises:
        DataError: names row, file and size.
    """
    width, height = image.size
    why = ""
    if min(width, height) < 1:
        why = "no pixels; at least one was expected"
    elif width * height > max_pixels:
        why = (
            f"{width * height} pixels; at most {max_pixels} are decoded (`max_image_pixels`), "
            "because a small file may unpack to all the memory of the machine"
        )
    elif max(width, height) > MAX_ASPECT * min(width, height):
        why = f"sides of more than {MAX_ASPECT} to 1, of which scaling leaves nothing to see"
    if why:
        raise DataError(
            f"{name}: the image {file_of(image)} of {width} x {height} has {why}. Scale the "
            "picture, or take the row out."
        )


def bad_image(file: object, error: Exception, *, name: str) -> DataError:
    """The error for an image that cannot be opened or decoded."""
    return DataError(
        f"{name}: the image {file} does not decode ({type(error).__name__}: {error}). A whole "
        "picture in a format that Pillow reads was expected, because its pixels are the model's "
        "input. Replace the file, or take the row out."
    )


def file_of(image: Image.Image) -> object:
    """The file that an image came from, for a message."""
    return getattr(image, "filename", "") or "in memory"
