"""A rendered prompt with its images -> the body of an OpenAI-style chat request. Sends nothing."""

import base64
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from PIL import Image

from stageline.data.batch import Images
from stageline.data.images import check_image, decode_image, image_size
from stageline.data.messages import Conversation, Turn
from stageline.data.rendered import Piece, Rendered
from stageline.errors import DataError

Message = dict[str, Any]
_AS_THEY_ARE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


def messages_of(
    prompt: Rendered, images: Images, *, name: str, max_image_side: int | None = None
) -> list[Message]:
    """The messages of a prompt: its turns, or all of it as one message of the user.

    Args:
        images: one for each place in the prompt.
        name: the prompt, for errors.
        max_image_side: larger pictures are scaled down to this many pixels.

    Raises:
        DataError: an image does not decode, or places and images differ in number.
    """
    if len(images or ()) != prompt.num_images:
        raise DataError(
            f"{name}: {len(images or ())} images came with {prompt.num_images} places for images. "
            "One place for each was expected: correct the row, or the template ([IMAGE])."
        )
    urls = iter([image_url(image, name=name, max_side=max_image_side) for image in images or ()])
    if isinstance(prompt, Conversation):
        return [
            {"role": turn.role, **_fields(turn), **content}
            for turn in prompt.turns
            for content in [_content(turn.pieces, urls)]
        ]
    return [{"role": "user", **_content(prompt.pieces, urls)}]


def _fields(turn: Turn) -> dict[str, Any]:
    """What a message has besides role and content; endpoints take arguments as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call)}}
        for call in turn.tool_calls
    ]
    fields = {"name": turn.name, "tool_call_id": turn.tool_call_id, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _as_text(call: dict[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _content(pieces: Iterable[Piece], urls: Iterator[str]) -> dict[str, Any]:
    """Plain text where there is no image: older servers know nothing else."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.is_image:
            parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += piece.text
        elif piece.text:
            parts.append({"type": "text", "text": piece.text})
    if all(part["type"] == "text" for part in parts):
        return {"content": "".join(part["text"] for part in parts)}
    return {"content": [part for part in parts if part.get("text") != ""]}


def image_url(image: Image.Image, *, name: str, max_side: int | None = None) -> str:
    """The picture as a data URL: its own file where that can be sent as it is, else a PNG."""
    check_image(image, name=name)
    kind = _AS_THEY_ARE.get(image.format or "")
    is_upright = image.size == image_size(image) and not image.getexif().get(0x0112, 1) > 1
    is_small = max_side is None or max(image.size) <= max_side
    file = getattr(image, "filename", "")
    if kind and file and is_upright and is_small:
        with open(file, "rb") as stream:
            content = stream.read()
    else:
        picture = decode_image(image, name=name)
        if not is_small:
            picture.thumbnail((max_side, max_side))
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        kind, content = "image/png", buffer.getvalue()
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def tools_of(prompt: Rendered) -> dict[str, Any]:
    """The field `tools` of a request, if the prompt has any."""
    tools = prompt.tools if isinstance(prompt, Conversation) else ()
    return {"tools": list(tools)} if tools else {}


def request_body(
    model: str,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    max_tokens_field: str,
    temperature: float | None,
    seed: int | None,
    extra: dict[str, Any] | None,
) -> dict[str, Any]:
    """The body of a chat request; what is None is left out, `extra` goes on top."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        max_tokens_field: max_tokens,
    }
    if temperature is not None:
        body["temperature"] = temperature
    if seed is not None:
        body["seed"] = seed
    return {**body, **(extra or {})}


def body_key(body: dict[str, Any]) -> str:
    """A name that belongs to this request alone: the same request gets the same answer."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
