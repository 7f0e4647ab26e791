"""Places of pictures and films in the messages of a row, and their names in the same order."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stageline.data.converters.layout import Layout, bad_row, shown
from stageline.data.converters.turns import Message

_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_KIND = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def place_media(
    messages: list[Message], row: Mapping[str, Any], layout: Layout, *, source: str
) -> dict[str, list[Any]]:
    """Turns <image> and <video> in texts into parts, and says which files belong there.

    Only where the row has the column are they places; elsewhere, and in answers, they are text.
    Names without a place stand before the first message of the user.

    Returns:
        `images` and `videos`, as far as there are any.

    Raises:
        DataError: there are not as many places as names.
    """
    names = {kind: _names(row, layout, kind, source) for kind in ("image", "video")}
    given = {kind for kind, value in names.items() if value is not None}
    has_parts = any(isinstance(message["content"], list) for message in messages)
    if not given and not has_parts:
        return {}
    for message in messages:
        _split(message, given, has_parts)
    media = {}
    for kind in ("video", "image"):  # put before the text one after the other: images are first
        found = _fill(messages, kind, names[kind], source)
        if found:
            media[f"{kind}s"] = found
    return media


def _names(row: Mapping[str, Any], layout: Layout, kind: str, source: str) -> list[Any] | None:
    value = layout.value(row, f"{kind}s")
    if value is None and f"{kind}s" not in layout.named:
        value = row.get(kind)
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(_is_name(name, kind) for name in value):
        raise bad_row(
            source,
            f"the {kind}s are {shown(value)}",
            "A file name or a list of them was",
            "they are read from files",
        )
    return value


def _is_name(value: Any, kind: str) -> bool:
    """A file; of a film also the files of its frames."""
    if kind == "video" and isinstance(value, list):
        return bool(value) and all(isinstance(frame, str) for frame in value)
    return isinstance(value, str)


def _split(message: Message, given: set[str], has_parts: bool) -> None:
    """Cuts the text at placeholders, in place; a row with parts has no placeholders."""
    content = message["content"]
    if has_parts or message["role"] == "assistant" or not isinstance(content, str):
        return
    wanted = {f"<{kind}>" for kind in given}
    parts: list[dict[str, str]] = []
    for text in _PLACEHOLDER.split(content):
        if text in wanted:
            parts.append({"type": text[1:-1]})
        elif text and parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    if any(part["type"] != "text" for part in parts):
        message["content"] = parts


def _fill(
    messages: Sequence[Message], kind: str, names: list[Any] | None, source: str
) -> list[Any]:
    """The names in the order of their places; parts lose theirs."""
    places = [
        (message["content"], index)
        for message in messages
        if isinstance(message["content"], list)
        for index, part in enumerate(message["content"])
        if _KIND.get(part["type"]) == kind
    ]
    own = [_own_name(parts[index]) for parts, index in places]
    for parts, index in places:
        parts[index] = {"type": kind}
    rest = list(names or ())
    if not places and rest:
        _put_first(messages, [{"type": kind} for _ in rest], source)
        return rest
    num_open = sum(name is None for name in own)
    if num_open != len(rest):
        raise bad_row(
            source,
            f"it has {num_open} places for {kind}s and {len(rest)} names",
            "As many were",
            f"each {kind} belongs to a place in the text (<{kind}>, or a part)",
            "correct the row",
        )
    return [rest.pop(0) if name is None else name for name in own]


def _own_name(part: Mapping[str, Any]) -> Any:
    for key in ("image", "video", "path", "url", "image_url", "video_url"):
        value = part.get(key)
        value = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(value, str | list) and value:
            return value
    return None


def _put_first(messages: Sequence[Message], parts: list[dict[str, str]], source: str) -> None:
    message = next((message for message in messages if message["role"] == "user"), None)
    if message is None:
        raise bad_row(
            source, "no message is of the user", "One was", "the pictures of the row belong to it"
        )
    content = message["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message["content"] = [*parts, *text]
