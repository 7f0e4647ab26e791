"""Pass requests from the event loop to the engine's thread, and events back, and count them.

Requests of a client that is gone are cancelled; a place counts until the engine has freed it.
"""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import (
    AnswerPiece,
    Cancelled,
    Failed,
    Finished,
    Request,
    Scored,
    ScoreRequest,
)
from stageline.serving.errors import bad_request, of_engine, too_busy

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# name in the engine's statistics -> description
_GAUGES = {
    "queued": "answers that wait for room in the engine",
    "running": "answers that the engine works on",
    "max_running": "answers that the engine can work on",
    "num_groups": "groups of answers that are under way in the stages",
    "cache_cells": "cells of the key-value cache that are used",
    "max_cache_cells": "cells of the key-value cache",
    "is_healthy": "1: the engine works",
}
Event = AnswerPiece | Finished | Scored | Failed


class Metrics:
    """The figures of one server; a registry of its own, so that servers can share a process."""

    def __init__(self, stats: Callable[[], Any]) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "stageline", "registry": self.registry}
        self.requests = Counter("requests", "by route and status", ["route", "status"], **shared)
        histogram: Any = functools.partial(Histogram, buckets=_SECONDS, **shared)
        self.seconds = histogram("request_seconds", "from request to end of answer", ["route"])
        self.first = histogram("first_token_seconds", "from being handed in to the first text")
        self.answer = histogram("answer_seconds", "from being handed in to the end")
        self.prompt_tokens = Counter("prompt_tokens", "tokens of answered prompts", **shared)
        self.tokens = Counter("completion_tokens", "tokens of answers", **shared)
        self.ends = Counter("answers", "answers by how they ended", ["reason"], **shared)
        self._begun: set[str] = set()

        def figure(name: str) -> float:
            return float(getattr(stats(), name, 0) or 0)

        for name, text in _GAUGES.items():
            gauge = Gauge(f"engine_{name.removeprefix('is_')}", text, **shared)
            gauge.set_function(functools.partial(figure, name))

    def see(self, key: str, event: "Event", asked_at: float) -> None:
        """Note a piece of an answer, its end, or the score of a prompt."""
        seconds = time.monotonic() - asked_at
        if isinstance(event, AnswerPiece):
            if key not in self._begun:
                self._begun.add(key)
                self.first.observe(seconds)
            return
        self._begun.discard(key)
        self.answer.observe(seconds)
        if isinstance(event, Finished):
            self.prompt_tokens.inc(event.prompt_tokens)
            self.tokens.inc(event.completion_tokens)
        word = "scored" if isinstance(event, Scored) else "failed"
        self.ends.labels(event.reason if isinstance(event, Finished) else word).inc()

    def see_request(self, route: str, status: int, seconds: float) -> None:
        """Note the end of a request; status 499: the client was gone before the answer."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all figures in Prometheus's format."""
        return generate_latest(self.registry)


class RequestQueue:
    """Counts what is under way; besides what the engine works on, `max_queue` answers may wait.

    Attributes:
        num_places: answers that are promised, be their prompts still read.
        is_closed: nothing more is taken, as the server ends.
    """

    def __init__(self, engine: DecodingEngine, *, max_queue: int, metrics: Metrics) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.metrics = metrics
        self.num_places = 0
        self.is_closed = False
        self._open: set[str] = set()

    @property
    def most_places(self) -> int:
        """Return the largest number of answers that can be running or queued."""
        return int(self.engine.stats().max_running) + self.max_queue

    @contextlib.contextmanager
    def place(self, count: int, *, adapter: int = 0) -> Iterator["Reservation"]:
        """Give room for some answers of one adapter (0: the base), or raise an ApiError."""
        self.check_open()
        if count > self.most_places:
            message = f"{count} answers at once; at most {self.most_places} are ever under way."
            raise bad_request(message, "n")
        if self.num_places + count > self.most_places:
            message = f"{self.num_places} of {self.most_places} answers are under way. Ask later."
            raise too_busy(message, status=429, code="queue_full")
        place = Reservation(self, count, adapter)
        self.num_places += count
        try:
            yield place
        finally:
            place.leave()

    def check_open(self) -> None:
        """Refuse with 503 where the engine is not well or the server ends."""
        if self.is_closed:
            raise too_busy("The server is ending.", code="shutting_down")
        if not self.engine.stats().is_healthy:
            raise too_busy("The engine is not healthy.", code="unhealthy")

    def cancel_all(self) -> None:
        """End everything that is under way."""
        for key in list(self._open):
            self.engine.cancel(key)


class Reservation:
    """Room for the answers of one request; see `RequestQueue.place`."""

    def __init__(self, owner: RequestQueue, count: int, adapter: int) -> None:
        self.owner = owner
        self._loop = asyncio.get_running_loop()
        self._num_unused = count
        self._adapter = adapter
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: set[str] = set()

    async def events(
        self, requests: Sequence[Request | ScoreRequest]
    ) -> AsyncIterator[tuple[int, AnswerPiece | Finished | Scored]]:
        """Hand requests in; yield (number, event) until all ended. A failure is an ApiError."""
        self._start(requests)
        num_left = len(requests)
        while num_left:
            number, event = await self._queue.get()
            num_left -= not isinstance(event, AnswerPiece)
            if isinstance(event, Failed):
                raise of_engine(event.error)
            if isinstance(event, Finished) and event.reason == "cancelled":
                raise of_engine(Cancelled())
            yield number, event

    def leave(self) -> None:
        """Give the places back: unused ones at once, the rest when the engine has ended them."""
        self.owner.num_places -= self._num_unused
        self._num_unused = 0
        for key in list(self._open):
            self.owner.engine.cancel(key)

    def _start(self, requests: Sequence[Request | ScoreRequest]) -> None:
        asked_at = time.monotonic()
        for number, request in enumerate(requests):
            key = f"{request.key}-{secrets.token_hex(8)}"  # clients choose no keys
            self._num_unused -= 1
            self._open.add(key)
            self.owner._open.add(key)
            take = functools.partial(self._take, number, key, asked_at)

            def listen(event: Event, take: Callable[[Event], None] = take) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(take, event)

            try:
                asked = replace(request, key=key, adapter=self._adapter)
                self.owner.engine.submit(asked, listen)
            except Exception as error:  # treat it as if it had failed later
                take(Failed(key, error))

    def _take(self, number: int, key: str, asked_at: float, event: Event) -> None:
        """Hand an event on, in the event loop."""
        if not isinstance(event, AnswerPiece):
            self._open.discard(key)
            self.owner._open.discard(key)
            self.owner.num_places -= 1
        self.owner.metrics.see(key, event, asked_at)
        self._queue.put_nowait((number, event))
