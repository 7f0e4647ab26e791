"""Videos as some of their frames, evenly spread, which become images of the sample.

A video is a folder of images, a list of them, or an animated GIF, WebP or PNG file; other formats
require the package av. The number of frames decides which of them are taken.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from stageline.data.images.image_files import FORMATS, ImageFolders, bad_image, check_shape
from stageline.errors import DataError, UserError
from stageline.tables import natural_key

ANIMATIONS = (".gif", ".webp", ".png", ".apng")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def frame_places(count: int, num_frames: int) -> list[int]:
    """Return which of `count` frames are taken: the first, the last, and evenly between."""
    if count <= num_frames:
        return list(range(count))
    if num_frames == 1:
        return [0]
    return [place * (count - 1) // (num_frames - 1) for place in range(num_frames)]


def with_videos(
    sample: dict[str, Any],
    images: list[Any] | None,
    *,
    folders: ImageFolders,
    num_frames: int,
    source: str,
) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return images and sample with an image for each frame of its `videos`, in their places."""
    if not sample.get("videos"):
        return images, sample
    options: dict[str, Any] = {"folders": folders, "num_frames": num_frames, "source": source}
    videos = iter([read_frames(video, **options) for video in sample["videos"]])
    rest = iter(images or ())
    placed: list[Any] = []
    messages = []
    for message in sample["messages"]:
        if isinstance(message["content"], list):
            parts: list[dict[str, Any]] = []
            for part in message["content"]:
                if part["type"] == "video":
                    frames = next(videos)
                    placed += frames
                    parts += [{"type": "image"}] * len(frames)
                    continue
                if part["type"] == "image":
                    placed.append(next(rest))
                parts.append(part)
            message = {**message, "content": parts}
        messages.append(message)
    placed += rest  # the sample has no places for these
    others = {name: value for name, value in sample.items() if name != "videos"}
    return placed or None, {**others, "messages": messages}


def read_frames(
    video: str | Sequence[str], *, folders: ImageFolders, num_frames: int, source: str
) -> list[Image.Image]:
    """Return at most `num_frames` frames of a video.

    Args:
        video: name of a folder of images or of a file, or the names of the frames.
        source: the row, for errors.
    """
    if num_frames < 1:
        raise UserError(f"num_frames is {num_frames}. Give at least 1: a video becomes images.")
    if not isinstance(video, str):
        if not video:
            raise _no_frames(source, "[]", "the list of its frames is empty")
        names = [video[place] for place in frame_places(len(video), num_frames)]
        return [folders.open(name, source=source) for name in names]
    path = Path(folders.locate(video, source=source))
    if path.is_dir():
        there = (item for item in path.iterdir() if item.suffix.lower() in _IMAGES)
        files = sorted((item.name for item in there if item.is_file()), key=natural_key)
        if not files:
            raise _no_frames(source, video, f"the folder holds none of {', '.join(_IMAGES)}")
        chosen = [files[place] for place in frame_places(len(files), num_frames)]
        return [folders.open(f"{video}/{name}", source=source) for name in chosen]
    read = _animation if path.suffix.lower() in ANIMATIONS else _decoded
    try:
        frames = read(path, num_frames, source)
    except (DataError, UserError):
        raise
    except Exception as error:  # decoders can raise any exception
        raise bad_image(path, error, name=source) from error
    if not frames:
        raise _no_frames(source, str(path), "it has no frames")
    return frames


def _animation(path: Path, num_frames: int, source: str) -> list[Image.Image]:
    with Image.open(path, formats=FORMATS) as opened:
        check_shape(opened, name=source)
        wanted = set(frame_places(getattr(opened, "n_frames", 1), num_frames))
        frames = ImageSequence.Iterator(opened)
        return [frame.convert("RGB") for place, frame in enumerate(frames) if place in wanted]


def _decoded(path: Path, num_frames: int, source: str) -> list[Image.Image]:
    """Return frames by PyAV, which counts them by decoding: headers are often wrong."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"{source}: the video {path} needs the package av. Run bash scripts/setup.sh video (or "
            "pip install av), or make images of it (ffmpeg -i VIDEO FOLDER/%05d.jpg)."
        ) from error
    with av.open(str(path)) as opened:
        count = sum(1 for _ in opened.decode(video=0))
    wanted = set(frame_places(count, num_frames))
    with av.open(str(path)) as opened:
        decoded = enumerate(opened.decode(video=0))
        return [frame.to_image() for place, frame in decoded if place in wanted]


def _no_frames(source: str, video: str, what: str) -> DataError:
    return DataError(f"{source}: the video {video} cannot be used: {what}. Correct the row.")
