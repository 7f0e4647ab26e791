"""A model behind an OpenAI-style endpoint: its client, and prompts as the messages that it takes.

The package `openai` sends and tries again (with growing pauses, or as the server's Retry-After
says).
"""

import base64
import io
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.batches.batch import Images
from stageline.data.images.images import check_image, decode_image, image_size
from stageline.data.text.messages import Conversation
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError, package


class Pace:
    """Lets `per_minute` requests through each minute, evenly; threads wait their turn."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = time.monotonic()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when it is this caller's turn."""
        if not self._gap:
            return
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        time.sleep(max(0.0, turn - time.monotonic()))


@dataclass
class Endpoint:
    """Address and limits of a remote model; the fields are those of `builder` remote.

    Attributes:
        base_url: None: OpenAI's own server.
        api_key_env: names the environment variable with the key, which is written nowhere.
    """

    name: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 120.0
    max_retries: int = 5
    requests_per_minute: float | None = None
    input_price: float | None = None
    output_price: float | None = None

    def __post_init__(self) -> None:
        self.pace = Pace(self.requests_per_minute)  # all batches share it

    def client(self) -> Any:
        """Return a client of the package openai; a UserError where package or key is missing."""
        openai = package("openai", "a remote model", extra="remote", instead="run a model here")
        key = os.environ.get(self.api_key_env)
        if not key and self.base_url is None:
            raise UserError(
                f"The environment variable {self.api_key_env} is empty, and OpenAI's own server "
                "requires a key. Export it, or give another server in `builder.base_url`."
            )
        return openai.OpenAI(
            api_key=key or "none",  # servers of one's own ask for none
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )


def send(client: Any, body: dict[str, Any], **options: Any) -> Any:
    """Send a request with its extra fields, which the package openai does not define."""
    others = {name: value for name, value in body.items() if name not in ("model", "messages")}
    return client.chat.completions.create(
        model=body["model"], messages=body["messages"], extra_body=others, **options
    )


Message = dict[str, Any]
_AS_THEY_ARE = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


def messages_of(
    prompt: Rendered, images: Images, *, name: str, max_image_side: int | None = None
) -> list[Message]:
    """Return the messages of a prompt: its turns, or all of it as one message of the user.

    Args:
        images: one for each place in the prompt; those with a longer side are scaled down.
        name: the prompt, for errors.
    """
    if len(images or ()) != prompt.num_images:
        raise DataError(
            f"{name}: {len(images or ())} images for {prompt.num_images} places. "
            "Correct the row, or the template ([IMAGE])."
        )
    urls = iter([image_url(image, name=name, max_side=max_image_side) for image in images or ()])
    if not isinstance(prompt, Conversation):
        return [{"role": "user", "content": _content(prompt.pieces, urls)}]
    messages = []
    for turn in prompt.turns:
        calls = []
        for call in turn.tool_calls:  # endpoints take arguments as JSON text
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        fields = {"name": turn.name, "tool_call_id": turn.tool_call_id, "tool_calls": calls}
        given = {field: value for field, value in fields.items() if value}
        messages.append({"role": turn.role, **given, "content": _content(turn.pieces, urls)})
    return messages


def _content(pieces: Iterable[Piece], urls: Iterator[str]) -> str | list[dict[str, Any]]:
    """Return a message's content; plain text if it has no image, for older servers."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.is_image:
            parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += piece.text
        elif piece.text:
            parts.append({"type": "text", "text": piece.text})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def image_url(image: Image.Image, *, name: str, max_side: int | None = None) -> str:
    """Return the picture as a data URL: its own file where that can be sent, else a PNG."""
    check_image(image, name=name)
    kind = _AS_THEY_ARE.get(image.format or "")
    is_upright = image.size == image_size(image) and not image.getexif().get(0x0112, 1) > 1
    is_small = max_side is None or max(image.size) <= max_side
    file = getattr(image, "filename", "")
    if kind and file and is_upright and is_small:
        content = Path(file).read_bytes()
    else:
        picture = decode_image(image, name=name)
        if max_side is not None and not is_small:
            picture.thumbnail((max_side, max_side))
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        kind, content = "image/png", buffer.getvalue()
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
