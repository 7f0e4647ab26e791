"""A film as some of its frames, evenly spread, which then are pictures of the sample.

Read are folders of pictures, lists of them, and animated GIF, WebP and PNG files; other films
where the package av is installed. Which frames are taken follows from their number alone.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from stageline.data.images.image_files import ImageFolders
from stageline.data.images.picture_file import FORMATS, bad_image, check_shape
from stageline.errors import DataError, UserError

ANIMATIONS = (".gif", ".webp", ".png", ".apng")
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def frame_places(count: int, num_frames: int) -> list[int]:
    """Which of `count` frames are taken: the first, the last, and evenly between; all of few."""
    if count <= num_frames:
        return list(range(count))
    if num_frames == 1:
        return [0]
    return [place * (count - 1) // (num_frames - 1) for place in range(num_frames)]


def read_frames(
    video: str | Sequence[str], *, folders: ImageFolders, num_frames: int, source: str
) -> list[Image.Image]:
    """At most `num_frames` frames of a film.

    Args:
        video: name of a folder of pictures or of a file, or the names of the frames.
        source: the row, for errors.

    Raises:
        DataError: it isn't there, leads out of the folders, or has no frame that can be read.
        UserError: it is a film of a kind for which a package is missing.
    """
    if num_frames < 1:
        raise UserError(
            f"num_frames is {num_frames}. At least 1 was expected, because a film becomes pictures."
        )
    if not isinstance(video, str):
        if not video:
            raise _no_frames(source, "[]", "the list of its frames is empty")
        names = [video[place] for place in frame_places(len(video), num_frames)]
        return [folders.open(name, source=source) for name in names]
    path = Path(folders.locate(video, source=source))
    if path.is_dir():
        files = sorted((item.name for item in path.iterdir() if _is_picture(item)), key=_natural)
        if not files:
            raise _no_frames(source, video, f"the folder holds none of {', '.join(_PICTURES)}")
        chosen = [files[place] for place in frame_places(len(files), num_frames)]
        return [folders.open(f"{video}/{name}", source=source) for name in chosen]
    if path.suffix.lower() in ANIMATIONS:
        return _animation(path, num_frames, source)
    return _film(path, num_frames, source)


def with_frames(
    sample: dict[str, Any],
    images: Sequence[Any] | None,
    frames: Sequence[Sequence[Any]],
) -> tuple[list[Any] | None, dict[str, Any]]:
    """The images and the sample with a picture for each frame, where its films stood.

    Args:
        images: of the sample's image parts, in order.
        frames: of each of its video parts, in order.
    """
    rest, films = iter(images or ()), iter(frames)
    shown: list[Any] = []
    messages = []
    for message in sample["messages"]:
        content = message["content"]
        if isinstance(content, list):
            parts = list(_replaced(content, rest, films, shown))
            message = {**message, "content": parts}
        messages.append(message)
    shown += rest  # of a sample without places
    rest_of_sample = {name: value for name, value in sample.items() if name != "videos"}
    return shown or None, {**rest_of_sample, "messages": messages}


def _replaced(
    parts: Sequence[dict[str, Any]],
    images: Iterator[Any],
    films: Iterator[Sequence[Any]],
    shown: list[Any],
) -> Iterator[dict[str, Any]]:
    for part in parts:
        if part["type"] == "video":
            frames = next(films)
            shown.extend(frames)
            yield from ({"type": "image"} for _ in frames)
            continue
        if part["type"] == "image":
            shown.append(next(images))
        yield part


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in _PICTURES and path.is_file()


def _natural(name: str) -> list[Any]:
    """Sorts frame2 before frame10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def _animation(path: Path, num_frames: int, source: str) -> list[Image.Image]:
    try:
        with Image.open(path, formats=FORMATS) as film:
            check_shape(film, name=source)
            wanted = set(frame_places(getattr(film, "n_frames", 1), num_frames))
            frames = ImageSequence.Iterator(film)
            return [frame.convert("RGB") for place, frame in enumerate(frames) if place in wanted]
    except DataError:
        raise
    except Exception as error:  # decoders raise anything
        raise bad_image(path, error, name=source) from error


def _film(path: Path, num_frames: int, source: str) -> list[Image.Image]:
    """Frames by PyAV, which counts them by decoding: what headers say is often wrong."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"{source}: the film {path} is a {path.suffix or 'file without a suffix'}. A folder of "
            f"pictures or one of {', '.join(ANIMATIONS)} was expected, because the package av, "
            "which reads other films, is not installed: pip install av, or take the film to "
            "pieces (ffmpeg -i FILM FOLDER/%05d.jpg)."
        ) from error
    try:
        with av.open(str(path)) as film:
            count = sum(1 for _ in film.decode(video=0))
        wanted = set(frame_places(count, num_frames))
        with av.open(str(path)) as film:
            decoded = enumerate(film.decode(video=0))
            frames = [frame.to_image() for place, frame in decoded if place in wanted]
    except Exception as error:  # decoders raise anything
        raise bad_image(path, error, name=source) from error
    if not frames:
        raise _no_frames(source, str(path), "it has no frames")
    return frames


def _no_frames(source: str, video: str, what: str) -> DataError:
    return DataError(
        f"{source}: the film {video} cannot be used: {what}. At least one frame was expected, "
        "because the frames are what the model sees: correct the row."
    )
