"""Image files that rows of data name: below the folders of the dataset only, and opened late.

Rows come from others. A name that leads elsewhere is refused in the same words whether or not
such a file exists, so that no error tells which files this machine has. Pixels are decoded late.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.errors import DataError

# decoders of other formats are rarely used and a common target of attacks
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000  # 150 MB in RGB; a camera's largest common picture
MAX_ASPECT = 200  # longer side / shorter side; the limit of Qwen's processors
_ORIENTATION = 0x0112  # EXIF


@dataclass(frozen=True)
class ImageSettings:
    """Limits of images."""

    max_pixels: int = MAX_PIXELS  # limit of one image; a larger one is refused before decoding
    max_images: int | None = None  # limit of one sample; None: any number


def open_picture(path: str | Any) -> Image.Image:
    """Open a file, or a file object, in one of `FORMATS`; decodes nothing."""
    with warnings.catch_warnings():
        # `check_image` has its own limit
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=FORMATS)


def is_turned(image: Image.Image) -> bool:
    """Tell whether people see width and height of an image exchanged."""
    return has_orientation(image) and image.getexif().get(_ORIENTATION, 1) >= 5


def has_orientation(image: Image.Image) -> bool:
    """Tell whether files of its format may say how it is to be turned."""
    return image.format in ("JPEG", "MPO")


def check_shape(image: Image.Image, *, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Refuse by the header only: more pixels than are decoded, or the shape of a thread."""
    width, height = image.size
    why = ""
    if min(width, height) < 1:
        why = "no pixels"
    elif width * height > max_pixels:
        why = f"{width * height} pixels; at most {max_pixels} are decoded (`images.pixel_limit`)"
    elif max(width, height) > MAX_ASPECT * min(width, height):
        why = f"sides of more than {MAX_ASPECT} to 1"
    if why:
        what = f"the image {file_of(image)} of {width} x {height} has {why}"
        raise DataError(f"{name}: {what}. Scale the picture, or take the row out.")


def bad_image(file: object, error: Exception, *, name: str) -> DataError:
    """Return the error for an image that cannot be opened or decoded."""
    return DataError(
        f"{name}: the image {file} does not decode ({type(error).__name__}: {error}). Replace it "
        f"by a whole picture, one of {', '.join(FORMATS)}, or take the row out."
    )


def file_of(image: Image.Image) -> object:
    """Return the file that an image came from, for a message."""
    return getattr(image, "filename", "") or "in memory"


class ImageFolders:
    """The folders that image names are relative to.

    An absolute name, one with "..", and a link are taken when the file they lead to is below one
    of the folders. A folder itself may be a link.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self._real_roots = [os.path.realpath(root) for root in roots]

    def check_name(self, name: str, *, source: str) -> None:
        """Refuse a name that leads out of the folders; looks at files only where it must."""
        if os.path.isabs(name) or ".." in name.split("/"):
            self._find(name, source)

    def open(self, name: str, *, source: str) -> Image.Image:
        """Return a picture that is not decoded."""
        path = self.locate(name, source=source, kind="image")
        try:
            return open_picture(path)
        except Exception as error:  # Pillow's readers can raise any exception
            raise bad_image(path, error, name=source) from error

    def locate(self, name: str, *, source: str, kind: str = "video") -> str:
        """Return the file of an image, the file or folder of a video; links are followed."""
        allowed = self._find(name, source)
        exists = os.path.isfile if kind == "image" else os.path.exists
        path = next((place for place in allowed if exists(place)), None)
        if path is None:
            raise DataError(
                f"{source}: there is no {kind} {name[:200]}, not at {', '.join(allowed)[:1000]}. "
                "Put it there, or correct the row or the dataset's option for the image folder."
            )
        return path

    def _find(self, name: str, source: str) -> list[str]:
        """Return the places where a file may be, links followed."""
        places = [os.path.realpath(os.path.join(root, name)) for root in self._real_roots]
        # below any of them: "images" below the data may be a link to another disk
        tops = tuple(root.rstrip(os.sep) + os.sep for root in self._real_roots)
        allowed = list(dict.fromkeys(place for place in places if place.startswith(tops)))
        is_there = any(map(os.path.exists, allowed))
        if not is_there and not all(place.startswith(tops) for place in places):
            raise DataError(
                f"{source}: the image name {name[:200]!r} leads out of the dataset's folders of "
                f"images ({', '.join(map(str, self.roots))}). Correct the row, or name the folder "
                "that holds it with the dataset's option for the image folder."
            )
        return allowed
