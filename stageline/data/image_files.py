"""Opens image files that rows of data name: below the folders of the dataset only.

Rows come from others. A name that leads elsewhere is refused in the same words whether or not
there is such a file, so that no error tells what lies on this machine. Pixels are not decoded here.
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stageline.data.images import bad_image, check_shape
from stageline.errors import DataError

# others have decoders that few people use and many have broken
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP")


class ImageFolders:
    """The folders that image names are relative to.

    An absolute name, one with "..", and a link are taken when the file they lead to lies below one
    of the folders. A folder itself may be a link.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self._real_roots = [os.path.realpath(root) for root in roots]

    def check_name(self, name: str, *, source: str) -> None:
        """Refuses a name that leads out of the folders; looks at files only where it must.

        Raises:
            DataError: names the row.
        """
        if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/") or "\0" in name:
            self._places(name, source)

    def open(self, name: str, *, source: str) -> Image.Image:
        """Opens an image without decoding it.

        Raises:
            DataError: the name leads out of the folders, there is no such file, it is no picture,
                or it is one of a size that is not taken.
        """
        places = self._places(name, source)
        path = next((place for place in places if _is_file(place)), None)
        if path is None:
            raise DataError(
                f"{source}: there is no image {name}. It was looked for at {', '.join(places)}. "
                "Put the file there, or correct the row or the dataset's option for the folder of "
                "images."
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
                image = Image.open(path, formats=FORMATS)
        except Exception as error:  # Pillow's readers raise anything
            raise bad_image(path, _plain(error, path), name=source) from error
        check_shape(image, name=source)
        return image

    def _places(self, name: str, source: str) -> list[str]:
        """Where the file may be, links followed; all below the folders."""
        found = []
        for root in self._real_roots:
            try:
                place = os.path.realpath(os.path.join(root, name))
            except (OSError, ValueError):  # a NUL in the name, or a name that is too long
                continue
            if any(_lies_below(place, folder) for folder in self._real_roots):
                found.append(place)
        if found:
            return list(dict.fromkeys(found))
        raise DataError(
            f"{source}: the image name {name[:200]!r} leads out of the dataset's folders of images "
            f"({', '.join(map(str, self.roots))}). A file below them was expected, because rows "
            "that others wrote must not read other files of this machine: correct the row, or give "
            "the dataset's option for the folder of images the folder that holds it."
        )


def _lies_below(place: str, folder: str) -> bool:
    return place.startswith(folder.rstrip(os.sep) + os.sep)


def _is_file(place: str) -> bool:
    try:
        return os.path.isfile(place)
    except (OSError, ValueError):
        return False


def _plain(error: Exception, path: str) -> Exception:
    """Pillow's error in clearer words where the file is none of the formats."""
    if type(error).__name__ != "UnidentifiedImageError":
        return error
    with open(path, "rb") as file:
        head = file.read(64)
    what = "it is empty" if not head else f"it begins with {head[:24]!r}"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "it is a web page or XML, as a failed download leaves"
    return type(error)(f"none of {', '.join(FORMATS)}: {what}")
