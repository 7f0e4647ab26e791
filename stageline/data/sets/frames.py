"""Films as pictures: a film of a row becomes a few of its frames, in the place where it stood.

A film is a list of picture files or a folder of them; files of video formats are not decoded here.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stageline.errors import DataError

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def place_frames(
    sample: dict[str, Any],
    names: Sequence[str] | None,
    *,
    most: int,
    list_folder: Callable[[str], list[str] | None],
    source: str,
) -> tuple[list[str] | None, dict[str, Any]]:
    """Names of pictures and frames in the order of their places, and the sample with such places.

    Args:
        names: of the row's pictures.
        most: frames of a film; of more they are taken evenly.
        list_folder: name -> names of the files in that folder; None where it is none.

    Raises:
        DataError: a film cannot be read, or there are not as many as places.
    """
    films = sample.get("videos")
    if not films:
        return (list(names) if names else None), sample
    pictures = iter(names or ())
    left = [_frames(film, most, list_folder, source) for film in films]
    placed: list[str] = []
    messages = []
    for message in sample.get("messages") or []:
        content = message.get("content")
        if isinstance(content, list):
            parts = list(_placed(content, pictures, left, placed, source))
            message = {**message, "content": parts}
        messages.append(message)
    rest = [*left, *pictures]
    if rest:
        raise DataError(
            f"{source}: {len(left)} films and {len(rest) - len(left)} pictures have no place. A "
            "place for each was expected (<video>, <image>, or a part of a message), because they "
            "are shown where they stand: correct the row."
        )
    shown = {name: value for name, value in sample.items() if name != "videos"}
    return placed, {**shown, "messages": messages}


def _placed(
    content: list[Any],
    pictures: Iterator[str],
    films: list[list[str]],
    placed: list[str],
    source: str,
) -> Iterator[Any]:
    """The parts of a message, with frames in place of films; adds names to `placed`."""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image", "video"):
            yield part
            continue
        if kind == "video":
            found = films.pop(0) if films else []
        else:
            found = [name for name in [next(pictures, None)] if name is not None]
        if not found:
            raise DataError(
                f"{source}: there are more places for {kind}s than {kind}s. As many were expected: "
                "correct the row."
            )
        placed += found
        yield from ({"type": "image"} for _ in found)


def _frames(
    film: Any, most: int, list_folder: Callable[[str], list[str] | None], source: str
) -> list[str]:
    found = film
    if isinstance(film, str):
        inside = list_folder(film)
        if inside is None:
            raise DataError(
                f"{source}: the film {film[:200]!r} is no folder. A folder of pictures, or a list "
                "of picture files, was expected, because video formats are not decoded: write its "
                "frames as pictures (ffmpeg -i film.mp4 film/%05d.jpg) and name the folder."
            )
        found = [name for name in inside if Path(name).suffix.lower() in _PICTURES]
    if not isinstance(found, list) or not found or not all(isinstance(n, str) for n in found):
        raise DataError(
            f"{source}: the film {str(film)[:200]!r} has no frames. At least one picture was "
            "expected: correct the row."
        )
    count = min(most, len(found))
    # the middles of so many equal stretches
    return [found[(2 * place + 1) * len(found) // (2 * count)] for place in range(count)]
