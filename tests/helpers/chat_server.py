"""A small OpenAI-style server on this machine with set responses, for tests of remote models."""

import base64
import io
import json
import re
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

Body = dict[str, Any]
Reply = tuple[int, Any] | str  # status with a JSON object or bytes; or the answer's text


class ChatServer:
    """Serves `/v1/chat/completions` until it is closed; a context manager.

    An answer's text goes out word by word where the request asks for a stream.

    Args:
        reply: (body of the request, how often the same body came before) -> what to send.
        models: what `/v1/models` lists.

    Attributes:
        bodies: of all requests, in the order in which they came.
        keys: the Authorization header of each.
        most_at_once: requests that were open at the same time.
    """

    def __init__(self, reply: Callable[[Body, int], Reply], *, models: Sequence[Body] = ()) -> None:
        self.reply = reply
        self.models = list(models)
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self._open = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, body: Body, key: str | None) -> Reply:
        """Record a request and return the response to send."""
        with self._lock:
            seen = self.bodies.count(body)
            self.bodies.append(body)
            self.keys.append(key)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            return self.reply(body, seen)
        finally:
            with self._lock:
                self._open -= 1


def question_of(body: Body) -> str:
    """Return all texts of the last message."""
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def images_of(body: Body) -> list[Image.Image]:
    """Return the decoded pictures of the last message."""
    content = body["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.answer(body, self.headers.get("Authorization"))
            if isinstance(reply, str):
                reply = 200, (_events if body.get("stream") else _completion)(body, reply)
            self._send(*reply)

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": server.models})

        def _send(self, status: int, content: Any) -> None:
            if status == 0:  # 0: hang up without an answer
                self.connection.close()
                return
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _events(body: Body, text: str) -> bytes:
    """Return a stream of chunks, a word each."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
    deltas: list[Body] = [{"content": word} for word in re.findall(r"\s*\S+|\s+$", text)]
    reasons = [*[None] * len(deltas), "stop"]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in zip([*deltas, {}], reasons, strict=True)
    ]
    data = [*map(json.dumps, chunks), "[DONE]"]
    return "".join(f"data: {one}\n\n" for one in data).encode()


def _completion(body: Body, text: str) -> Body:
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": f"{body['model']}-2026",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
    }
