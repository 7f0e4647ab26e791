"""A model behind an OpenAI-style endpoint: many requests at once, paced, tried again, counted.

The package `openai` sends and tries again (with growing pauses, or as the server's Retry-After
says). Requests for offline batch APIs are written to files instead.
"""

import base64
import functools
import hashlib
import io
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.batches.batch import Images
from stageline.data.images.images import check_image, decode_image, image_size
from stageline.data.text.messages import Conversation
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, RemoteError, UserError

MILLION = 1_000_000
USAGE = ("prompt_tokens", "completion_tokens")


class Pace:
    """Lets so many requests a minute through, evenly; threads wait their turn."""

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
    """Where a model is, and how often it may be asked; the fields are those of `builder` remote.

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
        self.pace = Pace(self.requests_per_minute)  # of all batches together

    def client(self) -> Any:
        """Return a client of the package openai; a UserError where package or key is missing."""
        try:
            from openai import OpenAI
        except ImportError as error:
            raise UserError(
                "The package openai, which talks to remote models, is not installed. Run bash "
                "scripts/setup.sh remote, or pip install openai."
            ) from error
        key = os.environ.get(self.api_key_env)
        if not key and self.base_url is None:
            raise UserError(
                f"The environment variable {self.api_key_env} is empty, and OpenAI's own server "
                "asks for a key. Export it, or give another server in `builder.base_url` "
                "(http://127.0.0.1:8000/v1)."
            )
        return OpenAI(
            api_key=key or "none",  # servers of one's own ask for none
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    def priced(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with what its tokens cost, where a price is known."""
        prices = (self.input_price, self.output_price)
        if "usage" not in answer or prices == (None, None):
            return answer
        read, written = (answer["usage"][name] for name in USAGE)
        cost = (read * (prices[0] or 0.0) + written * (prices[1] or 0.0)) / MILLION
        return {**answer, "cost": cost}


def ask_all(
    endpoint: Endpoint, bodies: Sequence[dict[str, Any]], *, concurrency: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Send all requests, at most `concurrency` at a time.

    Yields:
        (place, answer) as answers come: text, finish_reason, usage and the model's full name; or
        `error` alone, where one request failed for good.

    Raises:
        UserError: a wrong key, URL or model name, with which all requests would fail.
    """
    client = endpoint.client()
    import openai

    hopeless = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        endpoint.pace.wait()
        response = send(client, body)
        if not getattr(response, "choices", None):
            told = str(response)[:200]
            raise RemoteError(f"the answer of {endpoint.name} has no choices: {told}")
        return endpoint.priced(_answer(response.model_dump()))

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        waiting = {pool.submit(ask, body): place for place, body in enumerate(bodies)}
        for done in as_completed(waiting):
            try:
                answer = done.result()
            except Exception as error:  # of the package, or of what it builds on
                what = f"{type(error).__name__}: {str(error)[:500]}"
                if isinstance(error, hopeless):
                    raise UserError(
                        f"{endpoint.base_url or 'The server'} refuses the model {endpoint.name!r} "
                        f"({what}). Check `builder.name`, `builder.base_url` and the key in the "
                        f"environment variable {endpoint.api_key_env}."
                    ) from error
                answer = {"error": what}
            yield waiting[done], answer
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def send(client: Any, body: dict[str, Any], **options: Any) -> Any:
    """Send a request as it is, with fields that the package does not know."""
    others = {name: value for name, value in body.items() if name not in ("model", "messages")}
    return client.chat.completions.create(
        model=body["model"], messages=body["messages"], extra_body=others, **options
    )


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the JSON of an answer."""
    choice, usage = body["choices"][0], body.get("usage") or {}
    return {
        "text": choice["message"].get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": {name: int(usage.get(name) or 0) for name in USAGE},
        "answered_by": body.get("model"),
    }


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
            f"{name}: {len(images or ())} images came with {prompt.num_images} places for images. "
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


def tools_of(prompt: Rendered) -> dict[str, Any]:
    """The field `tools` of a request, if the prompt has any."""
    tools = prompt.tools if isinstance(prompt, Conversation) else ()
    return {"tools": list(tools)} if tools else {}


def request_bodies(
    endpoint: Endpoint,
    prompts: Sequence[Rendered],
    images: Sequence[Images],
    *,
    max_image_side: int | None,
    send_temperature: bool,
    temperature: float,
    seed: int,
    extra: Mapping[str, Any] | None,
    **limits: int,
) -> list[dict[str, Any]]:
    """Return the body of a chat request for each prompt; `extra` goes on top.

    Args:
        limits: the longest answer, by the endpoint's name for it.
    """
    drawn = {"temperature": temperature, "seed": seed} if send_temperature else {}
    bodies = []
    for prompt, row in zip(prompts, images, strict=True):
        messages = messages_of(prompt, row, name=prompt.name, max_image_side=max_image_side)
        body = {"model": endpoint.name, "messages": messages, **limits, **drawn}
        bodies.append({**body, **tools_of(prompt), **(extra or {})})
    return bodies


def body_key(body: dict[str, Any]) -> str:
    """Return a hash of the request: the same request gets the same answer."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# Files of requests for offline batch APIs, and the files of answers that come back: one JSON object
# a line, {"custom_id", "method", "url", "body"}. The id is a hash of the request, so no answer is
# taken for another question's.
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
        self._number, self._num_lines = 1, 0
        for number, path in enumerate(self.paths(), 1):
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a run that was killed tears the last line
            if whole != content:
                path.write_bytes(whole)
            lines = whole.decode("utf-8").splitlines()
            self.written |= {json.loads(line)["custom_id"] for line in lines}
            self._number, self._num_lines = number, len(lines)

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
            line = (json.dumps(request, ensure_ascii=False) + "\n").encode()
            with self._path_for(len(line)).open("ab") as file:
                file.write(line)
            self.written.add(key)
            self._num_lines += 1

    def _path_for(self, num_bytes: int) -> Path:
        path = self.folder / f"requests-{self._number:05d}.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        is_too_large = size > 0 and size + num_bytes > self.max_bytes
        if self._num_lines < self.max_requests and not is_too_large:
            return path
        self._number, self._num_lines = self._number + 1, 0
        return self._path_for(num_bytes)


def read_answers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return custom_id -> answer of one file of results, or of all `*.jsonl` in a folder.

    An answer has text, finish_reason and usage, or `error` where the request failed.

    Raises:
        UserError: there is no such file.
        DataError: a line is no answer; names file and line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"There are no answers at {path}. Give the .jsonl file that the batch API returned, or "
            "a folder with such files."
        )
    found = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                response = row.get("response") or {}
                if row.get("error") or response.get("status_code", 200) >= 400:
                    why = json.dumps(row.get("error") or response.get("body"))[:500]
                    found[row["custom_id"]] = {"error": why}
                else:
                    found[row["custom_id"]] = _answer(response["body"])
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise DataError(
                    f"{file}:{number}: this is no answer of a batch API ({type(error).__name__}: "
                    f"{error}). Give the file as it was downloaded: objects with custom_id and "
                    "response.body.choices."
                ) from error
    return found


# a model part is called for each batch of an evaluation
_answers_once = functools.cache(read_answers)
_files_once = functools.cache(RequestFiles)


def offline_answers(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    *,
    requests_path: str,
    answers_path: str | None,
) -> list[dict[str, Any] | None]:
    """The answer to each request that came back already; the other requests are written."""
    answers = _answers_once(answers_path) if answers_path else {}
    found = [answers.get(body_key(body)) for body in bodies]
    waiting = [body for body, answer in zip(bodies, found, strict=True) if answer is None]
    _files_once(requests_path).add(waiting)
    return [answer and endpoint.priced(answer) for answer in found]
