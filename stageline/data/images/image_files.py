"""Opens image files that rows of data name: below the folders of the dataset only.

Rows come from others. A name that leads elsewhere is refused in the same words whether or not
there is such a file, so that no error tells what lies on this machine. Pixels are not decoded here.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stageline.data.images.image_index import FileFacts, ImageIndex, file_key
from stageline.data.images.image_settings import current_image_settings
from stageline.data.images.picture_file import (
    FORMATS,
    PictureFile,
    bad_image,
    check_shape,
    is_turned,
    open_picture,
)
from stageline.errors import DataError


class ImageFolders:
    """The folders that image names are relative to.

    An absolute name, one with "..", and a link are taken when the file they lead to lies below one
    of the folders. A folder itself may be a link.

    A file whose header was read once is opened again only for its pixels: by this object, or with
    an image cache by any process.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self._real_roots = [os.path.realpath(root) for root in roots]
        settings = current_image_settings()
        self._max_pixels = settings.max_pixels
        self._index = settings.cache.index if settings.cache else ImageIndex()

    def check_name(self, name: str, *, source: str) -> None:
        """Refuses a name that leads out of the folders; looks at files only where it must.

        Raises:
            DataError: names the row.
        """
        is_plain = not os.path.isabs(name) and ".." not in name.split("/") and "\0" not in name
        if not is_plain:
            self._find(name, source)

    def open(self, name: str, *, source: str) -> PictureFile:
        """A picture that is not decoded, and not opened if it is known.

        Raises:
            DataError: the name leads out of the folders, there is no such file, it is no picture,
                or it is one of a size that is not taken.
        """
        path, places = self._find(name, source)
        if path is None:
            raise DataError(
                f"{source}: there is no image {name[:200]}. It was looked for at "
                f"{', '.join(places)[:1000]}. Put the file there, or correct the row or the "
                "dataset's option for the folder of images."
            )
        try:
            picture = self._picture(path)
        except Exception as error:  # Pillow's readers raise anything
            raise bad_image(path, _plain(error, path), name=source) from error
        try:
            check_shape(picture, name=source, max_pixels=self._max_pixels)
        except DataError:
            picture.close()
            raise
        return picture

    def locate(self, name: str, *, source: str) -> str:
        """The file or folder of a film, links followed.

        Raises:
            DataError: the name leads out of the folders, or there is no such file or folder.
        """
        path, places = self._find(name, source, exists=_exists)
        if path is None:
            raise DataError(
                f"{source}: there is no film {name[:200]}. A file or a folder of pictures was "
                f"looked for at {', '.join(places)[:1000]}. Put it there, or correct the row or "
                "the dataset's option for the folder of images."
            )
        return path

    def _picture(self, path: str) -> PictureFile:
        key = file_key(path, os.stat(path))
        facts, opened = self._index.get(key), None
        if facts is None:
            opened = open_picture(path)
            facts = FileFacts(opened.size, opened.mode, opened.format or "", is_turned(opened))
            self._index.note(key, facts)
        return PictureFile(path, key=key, facts=facts, index=self._index, opened=opened)

    def _find(
        self, name: str, source: str, exists: Callable[[str], bool] | None = None
    ) -> tuple[str | None, list[str]]:
        """The file, links followed, if there is one; and the places where it may be."""
        places = [_real_path(os.path.join(root, name)) for root in self._real_roots]
        allowed = list(dict.fromkeys(place for place in places if self._is_below(place)))
        path = next((place for place in allowed if (exists or _is_file)(place)), None)
        if path is None and not all(self._is_below(place) for place in places):
            raise self._leads_out(name, source)
        return path, allowed

    def _is_below(self, place: str) -> bool:
        """Below any of the folders: "images" below the data may be a link to another disk."""
        return any(place.startswith(root.rstrip(os.sep) + os.sep) for root in self._real_roots)

    def _leads_out(self, name: str, source: str) -> DataError:
        return DataError(
            f"{source}: the image name {name[:200]!r} leads out of the dataset's folders of images "
            f"({', '.join(map(str, self.roots))}). A file below them was expected, because rows "
            "that others wrote must not read other files of this machine: correct the row, or give "
            "the dataset's option for the folder of images the folder that holds it."
        )


def _real_path(path: str) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a NUL in the name
        return ""


def _is_file(place: str) -> bool:
    try:
        return os.path.isfile(place)
    except (OSError, ValueError):
        return False


def _exists(place: str) -> bool:
    try:
        return os.path.exists(place)
    except (OSError, ValueError):
        return False


def _plain(error: Exception, path: str) -> Exception:
    """Pillow's error in clearer words where the file is none of the formats."""
    if type(error).__name__ != "UnidentifiedImageError":
        return error
    with open(path, "rb") as file:
        head = file.read(64)
    what = "it is empty" if not head else f"it begins with {head[:24]!r}"
    if head.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM")):
        return type(error)("it begins as an image does, but its header is damaged or cut")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "it is a web page or XML, as a failed download leaves"
    return type(error)(f"none of {', '.join(FORMATS)}: {what}")
