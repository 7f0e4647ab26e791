"""A model behind an OpenAI-style endpoint: many requests at once, paced, tried again, counted.

The package `openai` does the talking and trying again (with growing pauses, or as the server's
Retry-After says). Not here: what a request consists of (remote_messages.py).
"""

import base64
import hashlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.batches.batch import Images
from stageline.data.images.images import check_image, decode_image, image_size
from stageline.data.text.messages import Conversation, Turn
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, RemoteError, UserError

MILLION = 1_000_000


class Pace:
    """Lets through so many a minute, evenly; threads wait their turn."""

    def __init__(
        self,
        per_minute: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._clock, self._sleep = clock, sleep
        self._next = clock()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Returns when it is this caller's turn."""
        if not self._gap:
            return
        with self._lock:
            turn = max(self._next, self._clock())
            self._next = turn + self._gap
        self._sleep(max(0.0, turn - self._clock()))


@dataclass
class Endpoint:
    """Where a model is, and how often it may be asked.

    Attributes:
        name: the model's name there.
        base_url: such as http://127.0.0.1:8000/v1; None: the maker's own.
        api_key_env: the environment variable with the key, which is written nowhere.
        timeout: seconds for one attempt.
        max_retries: further attempts after a failure that may pass.
        requests_per_minute: paced evenly; None: as fast as answers come.
        input_price, output_price: for a million tokens, in any currency.
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
        self.pace = Pace(self.requests_per_minute)  # of all batches together

    def client(self) -> Any:
        """The package's client.

        Raises:
            UserError: the package, or the key for a server of others, is missing.
        """
        try:
            from openai import OpenAI
        except ImportError as error:
            raise UserError(
                "a remote model needs the package openai, which is not installed. It was expected "
                "because it does the talking: `pip install openai`."
            ) from error
        key = os.environ.get(self.api_key_env)
        if not key and self.base_url is None:
            raise UserError(
                f"the environment variable {self.api_key_env} is empty, and no `builder.base_url` "
                "came. A key was expected, because the maker's own server asks for one: export "
                "it, or give the URL of another server (http://127.0.0.1:8000/v1)."
            )
        return OpenAI(
            api_key=key or "none",  # servers of one's own ask for none
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    def price(self, usage: dict[str, int]) -> float | None:
        """What the tokens of some answers cost; None where no price is known."""
        if self.input_price is None and self.output_price is None:
            return None
        return (
            usage["prompt_tokens"] * (self.input_price or 0.0)
            + usage["completion_tokens"] * (self.output_price or 0.0)
        ) / MILLION


def ask_all(
    endpoint: Endpoint, bodies: Sequence[dict[str, Any]], *, concurrency: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Sends all requests, at most `concurrency` at a time.

    Yields:
        (place, answer) as answers come: text, finish_reason, usage and the model's full name; or
        `error` alone, where one request failed for good.

    Raises:
        UserError: what no other request can do better: a wrong key, URL or model name.
    """
    client = endpoint.client()

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        endpoint.pace.wait()
        return _answer(client.chat.completions.create(**split_body(body)), endpoint)

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        waiting = {pool.submit(ask, body): place for place, body in enumerate(bodies)}
        for done in as_completed(waiting):
            place = waiting[done]
            try:
                yield place, done.result()
            except Exception as error:  # of the package, or of what it builds on
                yield place, {"error": _failure(error, endpoint)}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_KNOWN = {
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "top_p",
    "stop", "logprobs", "top_logprobs", "n", "response_format", "tools", "tool_choice",
    "presence_penalty", "frequency_penalty", "reasoning_effort",
}  # fmt: skip


def split_body(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that the package has no argument for go into the body beside it."""
    others = {name: value for name, value in body.items() if name not in _KNOWN}
    known = {name: value for name, value in body.items() if name in _KNOWN}
    return {**known, "extra_body": others} if others else known


def _answer(response: Any, endpoint: Endpoint) -> dict[str, Any]:
    if not getattr(response, "choices", None):
        raise RemoteError(f"the answer of {endpoint.name} has no choices: {str(response)[:200]}")
    choice = response.choices[0]
    found = {"prompt_tokens": 0, "completion_tokens": 0}
    if response.usage is not None:
        found = {name: int(getattr(response.usage, name) or 0) for name in found}
    answer = {
        "text": choice.message.content or "",
        "finish_reason": choice.finish_reason,
        "usage": found,
        "answered_by": response.model,
    }
    cost = endpoint.price(found)
    return answer if cost is None else {**answer, "cost": cost}


def _failure(error: Exception, endpoint: Endpoint) -> str:
    """What is kept of a request that failed; raises where all others would fail, too."""
    import openai

    what = f"{type(error).__name__}: {str(error)[:500]}"
    hopeless = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
    if isinstance(error, (*hopeless, UserError)):
        raise UserError(
            f"{endpoint.base_url or 'the server'} refuses the model {endpoint.name!r} ({what}). A "
            "model and a key that it knows were expected: look at `builder.name`, "
            f"`builder.base_url` and the environment variable {endpoint.api_key_env}."
        ) from error
    return what


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
        if max_side is not None and not is_small:
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


# Files of requests for offline batch APIs, and the files of answers that come back.
# One JSON object a line: {"custom_id", "method", "url", "body"}; the answer to it has the same
# custom_id. The id is a hash of the request, so no answer is taken for another question's.

URL = "/v1/chat/completions"
MAX_REQUESTS = 50_000  # of one file; what the maker of the format takes
MAX_BYTES = 190 * 2**20  # it takes 200 MB


class RequestFiles:
    """Appends requests to requests-00001.jsonl and further files; each request once.

    Args:
        folder: where they lie; requests of an earlier, stopped run are kept.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.written: set[str] = set()
        for path in self.paths():
            whole = _whole_lines(path)
            self.written |= {json.loads(line)["custom_id"] for line in whole}

    def paths(self) -> list[Path]:
        """The files in order."""
        return sorted(self.folder.glob("requests-*.jsonl"))

    def add(self, bodies: list[dict[str, Any]]) -> None:
        """Writes those that are not there yet."""
        for body in bodies:
            key = body_key(body)
            if key in self.written:
                continue
            request = {"custom_id": key, "method": "POST", "url": URL, "body": body}
            line = json.dumps(request, ensure_ascii=False) + "\n"
            with self._path_for(len(line.encode())).open("a", encoding="utf-8") as file:
                file.write(line)
            self.written.add(key)

    def _path_for(self, num_bytes: int) -> Path:
        paths = self.paths()
        if not paths:
            return self._path(1)
        last = paths[-1]
        with last.open("rb") as file:
            num_lines = sum(1 for _ in file)
        is_full = num_lines >= self.max_requests or last.stat().st_size + num_bytes > self.max_bytes
        return self._path(len(paths) + 1) if is_full else last

    def _path(self, number: int) -> Path:
        return self.folder / f"requests-{number:05d}.jsonl"


def _whole_lines(path: Path) -> list[str]:
    """Its lines, after a torn last one was cut off."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return whole.decode("utf-8").splitlines()


def read_answers(path: str | Path) -> dict[str, dict[str, Any]]:
    """custom_id -> answer of one file of results, or of all `*.jsonl` in a folder.

    An answer has text, finish_reason and usage, or `error` where the request failed.

    Raises:
        UserError: there is no such file.
        DataError: a line is no answer; names file and line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"there are no answers at {path}. The .jsonl file that the batch API gave back was "
            "expected, or a folder with such files: download it and give its path."
        )
    return {key: answer for file in files for key, answer in _read(file)}


def _read(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield row["custom_id"], _batch_answer(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(
                f"{file}:{number}: this is no answer of a batch API ({type(error).__name__}: "
                f"{error}). An object with custom_id and response.body.choices was expected: give "
                "the file as it was downloaded."
            ) from error


def _batch_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    response = row.get("response") or {}
    failed = row.get("error") or response.get("status_code", 200) >= 400
    if failed:
        return {"error": json.dumps(row.get("error") or response.get("body"))[:500]}
    body = response["body"]
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    return {
        "text": choice["message"].get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": {
            name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")
        },
        "answered_by": body.get("model"),
    }
