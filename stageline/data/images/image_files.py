"""Image files that rows of data name: below the folders of the dataset only, and opened late.

Rows come from others. A name that leads elsewhere is refused in the same words whether or not
there is such a file, so that no error tells what lies on this machine. Pixels are decoded late.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.images.image_settings import MAX_PIXELS, current_image_settings
from stageline.errors import DataError

# others have decoders that few people use and many have broken
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_ASPECT = 200  # of the longer side to the shorter; what Qwen's processors take
_ORIENTATION = 0x0112  # EXIF
_HAS_ORIENTATION = ("JPEG", "MPO")


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


def check_shape(image: Image.Image, *, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Refuses by the header alone: more pixels than are decoded, or the shape of a thread."""
    width, height = image.size
    why = ""
    if min(width, height) < 1:
        why = "no pixels; at least one was expected"
    elif width * height > max_pixels:
        why = (
            f"{width * height} pixels; at most {max_pixels} are decoded (`images.pixel_limit`), "
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
        f"{name}: the image {file} does not decode ({type(error).__name__}: {error}). Replace it "
        f"by a whole picture, one of {', '.join(FORMATS)}, or take the row out."
    )


def file_of(image: Image.Image) -> object:
    """The file that an image came from, for a message."""
    return getattr(image, "filename", "") or "in memory"


class ImageFolders:
    """The folders that image names are relative to.

    An absolute name, one with "..", and a link are taken when the file they lead to lies below one
    of the folders. A folder itself may be a link.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self._real_roots = [os.path.realpath(root) for root in roots]
        self._max_pixels = current_image_settings().max_pixels

    def check_name(self, name: str, *, source: str) -> None:
        """Refuses a name that leads out of the folders; looks at files only where it must."""
        is_plain = not os.path.isabs(name) and ".." not in name.split("/") and "\0" not in name
        if not is_plain:
            self._find(name, source)

    def open(self, name: str, *, source: str) -> Image.Image:
        """A picture that is not decoded."""
        path, places = self._find(name, source)
        if path is None:
            raise _missing("image", name, places, source=source)
        try:
            picture = open_picture(path)
        except Exception as error:  # Pillow's readers raise anything
            raise bad_image(path, _plain(error, path), name=source) from error
        try:
            check_shape(picture, name=source, max_pixels=self._max_pixels)
        except DataError:
            picture.close()
            raise
        return picture

    def locate(self, name: str, *, source: str) -> str:
        """The file or folder of a video, links followed."""
        path, places = self._find(name, source, exists=os.path.exists)
        if path is None:
            raise _missing("video", name, places, source=source)
        return path

    def _find(
        self, name: str, source: str, exists: Callable[[str], bool] = os.path.isfile
    ) -> tuple[str | None, list[str]]:
        """The file, links followed, if there is one; and the places where it may be."""
        places = [_real_path(os.path.join(root, name)) for root in self._real_roots]
        allowed = list(dict.fromkeys(place for place in places if self._is_below(place)))
        path = next((place for place in allowed if exists(place)), None)
        if path is None and not all(self._is_below(place) for place in places):
            raise DataError(
                f"{source}: the image name {name[:200]!r} leads out of the dataset's folders of "
                f"images ({', '.join(map(str, self.roots))}). Rows must not read other files of "
                "this machine: correct the row, or give the dataset's option for the folder of "
                "images the folder that holds it."
            )
        return path, allowed

    def _is_below(self, place: str) -> bool:
        """Below any of the folders: "images" below the data may be a link to another disk."""
        return any(place.startswith(root.rstrip(os.sep) + os.sep) for root in self._real_roots)


def _missing(kind: str, name: str, places: Sequence[str], *, source: str) -> DataError:
    return DataError(
        f"{source}: there is no {kind} {name[:200]}. It was looked for at "
        f"{', '.join(places)[:1000]}. Put it there, or correct the row or the dataset's option for "
        "the folder of images."
    )


def _real_path(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # no name of a file, as one with a NUL
        return ""


def _plain(error: Exception, path: str) -> Exception:
    """Pillow's error in clearer words where the file is none of the formats."""
    if type(error).__name__ != "UnidentifiedImageError":
        return error
    with open(path, "rb") as file:
        head = file.read(64)
    what = f"it begins with {head[:24]!r}" if head else "it is empty"
    if head.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM")):
        what = "its header is damaged or cut"
    elif head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "it is a web page or XML, as a failed download leaves"
    return type(error)(what)
