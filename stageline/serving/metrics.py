"""Figures for Prometheus: what came, how long it took, what the engine does."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from stageline.inference.decoding.request import Failed, Finished, Scored

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# of the engine's statistics: name there -> what it is
_GAUGES = {
    "queued": "answers that wait for room in the engine",
    "running": "answers that the engine works on",
    "max_running": "answers that the engine can work on",
    "num_groups": "groups of answers that are under way in the stages",
    "cache_cells": "cells of the key-value cache that are used",
    "max_cache_cells": "cells of the key-value cache",
}


class Metrics:
    """The figures of one server; a registry of its own, so that servers can share a process.

    Args:
        stats: the engine's.
    """

    def __init__(self, stats: Callable[[], Any]) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "stageline", "registry": self.registry}
        self.requests = Counter(
            "requests", "requests by route and status", ["route", "status"], **shared
        )
        self.seconds = Histogram(
            "request_seconds", "from request to end of answer", ["route"], buckets=_SECONDS,
            **shared,
        )  # fmt: skip
        self.first = Histogram(
            "first_token_seconds", "from being handed in to the first text", buckets=_SECONDS,
            **shared,
        )  # fmt: skip
        self.answer = Histogram(
            "answer_seconds", "from being handed in to the end", buckets=_SECONDS, **shared
        )
        self.prompt_tokens = Counter("prompt_tokens", "tokens of answered prompts", **shared)
        self.tokens = Counter("completion_tokens", "tokens of answers", **shared)
        self.ends = Counter("answers", "answers by how they ended", ["reason"], **shared)
        self._begun: set[str] = set()

        def figure(name: str) -> Callable[[], float]:
            return lambda: float(getattr(stats(), name, 0) or 0)

        for name, text in _GAUGES.items():
            gauge = Gauge(f"engine_{name}", text, **shared)
            gauge.set_function(figure(name))
        healthy = Gauge("engine_healthy", "1: the engine works", **shared)
        healthy.set_function(lambda: float(stats().is_healthy))

    def see_piece(self, key: str, asked_at: float) -> None:
        """A piece of an answer came."""
        if key not in self._begun:
            self._begun.add(key)
            self.first.observe(time.monotonic() - asked_at)

    def see_end(self, key: str, event: Finished | Scored | Failed, asked_at: float) -> None:
        """An answer ended, or the score of a prompt."""
        self._begun.discard(key)
        self.answer.observe(time.monotonic() - asked_at)
        if isinstance(event, Finished):
            self.prompt_tokens.inc(event.prompt_tokens)
            self.tokens.inc(event.completion_tokens)
        word = "scored" if isinstance(event, Scored) else "failed"
        self.ends.labels(event.reason if isinstance(event, Finished) else word).inc()

    def see_request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered; status 499: nobody waited for that any more."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """All figures in Prometheus's format."""
        return generate_latest(self.registry)
