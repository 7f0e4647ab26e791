"""Image files that rows of data name: below the folders of the dataset only, and opened late.

Rows come from others. A name that leads elsewhere is refused in the same words whether or not
there is such a file, so that no error tells what lies on this machine. A file is opened only when
more is asked of it than its size and kind; these are kept once they are known, with the hash of its
content and whether it decodes: in memory, and in a file of lines if there is one.
"""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
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


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What one image file is.

    Attributes:
        size: width and height as the header says them, before any turning.
        mode, format: Pillow's names.
        is_turned: people see width and height exchanged (EXIF).
        digest: hash of the content, where it was read.
        is_whole: its pixels were decoded without an error.
    """

    size: tuple[int, int]
    mode: str
    format: str
    is_turned: bool = False
    digest: str | None = None
    is_whole: bool = False

    def with_more(self, *, digest: str | None = None, is_whole: bool = False) -> "FileFacts":
        """The facts and what else was found out."""
        return replace(self, digest=self.digest or digest, is_whole=self.is_whole or is_whole)


def file_key(path: str, stat: os.stat_result) -> str:
    """Tells one state of a file from others."""
    text = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class ImageIndex:
    """Facts of files by their key.

    A file is known by its path, length and both times of change, so that one that was replaced is
    a new one. Every process reads the lines of the others and adds its own; a line that is torn or
    damaged is passed over.

    Args:
        file: where they are kept; None: in memory alone.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[str, FileFacts] = {}
        self._read_bytes = 0

    def get(self, key: str) -> FileFacts | None:
        """What is known of a file, also by other processes."""
        if key not in self._known:
            self._read_news()
        return self._known.get(key)

    def note(self, key: str, facts: FileFacts) -> None:
        """Adds to what is known."""
        old = self._known.get(key)
        if old is not None and (old.size, old.mode, old.format) == (
            facts.size,
            facts.mode,
            facts.format,
        ):
            facts = facts.with_more(digest=old.digest, is_whole=old.is_whole)
        if facts != old:
            self._known[key] = facts
            self._write(key, facts)

    def _write(self, key: str, facts: FileFacts) -> None:
        if self._file is None:
            return
        fields = [key, *facts.size, facts.mode, facts.format, facts.is_turned]
        text = json.dumps([*fields, facts.digest, facts.is_whole]).encode()
        try:
            # one write of one line: those of several processes do not mix
            with self._file.open("ab", buffering=0) as file:
                file.write(b"\n%08x %s\n" % (zlib.crc32(text), text))  # a torn line ends here
        except OSError as error:
            warnings.warn(f"the index {self._file} of images is not kept: {error}", stacklevel=2)
            self._file = None

    def _read_news(self) -> None:
        """Reads what was added since; a line without its end comes next time."""
        if self._file is None:
            return
        try:
            if self._file.stat().st_size <= self._read_bytes:
                return
            with self._file.open("rb") as file:
                file.seek(self._read_bytes)
                news = file.read()
        except OSError:  # not there yet, or gone: then nothing is known
            return
        whole = news[: news.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            entry = _parse(line)
            if entry is not None:
                self._known[entry[0]] = entry[1]


def _parse(line: bytes) -> tuple[str, FileFacts] | None:
    check, _, text = line.partition(b" ")
    try:
        if int(check, 16) != zlib.crc32(text):
            return None
        fields: list[Any] = json.loads(text)
        key, width, height, mode, kind, is_turned, digest, is_whole = fields
        return key, FileFacts((width, height), mode, kind, is_turned, digest, is_whole)
    except ValueError:
        return None


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
            self.facts = self.facts.with_more(digest=digest, is_whole=is_whole)
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
        """The file or folder of a video, links followed.

        Raises:
            DataError: the name leads out of the folders, or there is no such file or folder.
        """
        path, places = self._find(name, source, exists=os.path.exists)
        if path is None:
            raise DataError(
                f"{source}: there is no video {name[:200]}. A file or a folder of images was "
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
        self, name: str, source: str, exists: Callable[[str], bool] = os.path.isfile
    ) -> tuple[str | None, list[str]]:
        """The file, links followed, if there is one; and the places where it may be."""
        places = [_real_path(os.path.join(root, name)) for root in self._real_roots]
        allowed = list(dict.fromkeys(place for place in places if self._is_below(place)))
        path = next((place for place in allowed if exists(place)), None)
        if path is None and not all(self._is_below(place) for place in places):
            raise DataError(
                f"{source}: the image name {name[:200]!r} leads out of the dataset's folders of "
                f"images ({', '.join(map(str, self.roots))}). A file below them was expected, "
                "because rows that others wrote must not read other files of this machine: "
                "correct the row, or give the dataset's option for the folder of images the "
                "folder that holds it."
            )
        return path, allowed

    def _is_below(self, place: str) -> bool:
        """Below any of the folders: "images" below the data may be a link to another disk."""
        return any(place.startswith(root.rstrip(os.sep) + os.sep) for root in self._real_roots)


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
    what = "it is empty" if not head else f"it begins with {head[:24]!r}"
    if head.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM")):
        return type(error)("it begins as an image does, but its header is damaged or cut")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "it is a web page or XML, as a failed download leaves"
    return type(error)(f"none of {', '.join(FORMATS)}: {what}")
