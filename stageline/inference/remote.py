"""A model behind an OpenAI-style endpoint: many requests at once, paced, tried again, counted.

The package `openai` does the talking and trying again (with growing pauses, or as the server's
Retry-After says). Not here: what a request consists of (remote_messages.py).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from stageline.errors import RemoteError, UserError

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
                f"the environment variable {self.api_key_env} is empty, and no --builder.base_url "
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
        return _answer(client.chat.completions.create(**_split(body)), endpoint)

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


def _split(body: dict[str, Any]) -> dict[str, Any]:
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
            "model and a key that it knows were expected: look at --builder.name, "
            f"--builder.base_url and the environment variable {endpoint.api_key_env}."
        ) from error
    return what
