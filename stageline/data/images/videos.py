"""Videos as some of their frames, evenly spread, which become images of the sample.

A video is a folder of images, a list of them, or an animated GIF, WebP or PNG file; other formats
require the package av. The number of frames decides which of them are taken.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from stageline.data.images.image_files import FORMATS, ImageFolders, bad_image, check_shape
from stageline.errors import DataError, UserError, package
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
        content = message["content"]
        if isinstance(content, list):
            parts: list[dict[str, Any]] = []
            for part in content:
                found = {"video": videos, "image": ([one] for one in rest)}.get(part["type"])
                if found is None:
                    parts.append(part)
                else:
                    frames = next(found)
                    placed += frames
                    parts += [{"type": "image"}] * len(frames)
            content = parts
        messages.append({**message, "content": content})
    placed += rest  # the sample has no places for these
    others = {name: value for name, value in sample.items() if name != "videos"}
    return placed or None, {**others, "messages": messages}


def read_frames(
    video: str | Sequence[str], *, folders: ImageFolders, num_frames: int, source: str
) -> list[Image.Image]:
    """Return at most `num_frames` frames of a video: of a folder of images, a file, or a list."""
    if num_frames < 1:
        raise UserError(f"num_frames is {num_frames}. Give at least 1: a video becomes images.")
    names: list[str] = []
    if not isinstance(video, str):
        names = list(video)
    else:
        path = Path(folders.locate(video, source=source))
        if not path.is_dir():
            return _frames_of_file(path, num_frames, source)
        there = (item for item in path.iterdir() if item.suffix.lower() in _IMAGES)
        files = sorted((item.name for item in there if item.is_file()), key=natural_key)
        names = [f"{video}/{name}" for name in files]
    if not names:
        raise DataError(
            f"{source}: the video {video} has no frames: the folder holds none of "
            f"{', '.join(_IMAGES)}. Correct the row."
        )
    chosen = frame_places(len(names), num_frames)
    return [folders.open(names[place], source=source) for place in chosen]


def _frames_of_file(path: Path, num_frames: int, source: str) -> list[Image.Image]:
    """Return frames of an animation by Pillow; of other files by PyAV.

    PyAV counts frames by decoding them: headers are often wrong.
    """
    try:
        if path.suffix.lower() in ANIMATIONS:
            with Image.open(path, formats=FORMATS) as opened:
                check_shape(opened, name=source)
                wanted = set(frame_places(getattr(opened, "n_frames", 1), num_frames))
                frames = enumerate(ImageSequence.Iterator(opened))
                return [frame.convert("RGB") for place, frame in frames if place in wanted]
        other = "make images of it (ffmpeg -i VIDEO FOLDER/%05d.jpg)"
        av = package("av", f"{source}: the video {path}", extra="video", instead=other)
        with av.open(str(path)) as video:
            wanted = set(frame_places(sum(1 for _ in video.decode(video=0)), num_frames))
        with av.open(str(path)) as video:
            decoded = enumerate(video.decode(video=0))
            found = [frame.to_image() for place, frame in decoded if place in wanted]
        assert found, "it has no frames"
        return found
    except UserError:
        raise
    except Exception as error:  # decoders can raise any exception
        raise bad_image(path, error, name=source) from error
