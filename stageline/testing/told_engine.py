"""Engines that say what a test has them say, behind links of this process and in one router."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.decoding.request import (
    Finished,
    Listener,
    Piece,
    Request,
    Sampling,
    TokenLogprob,
)
from stageline.inference.replicas.host import host_engine
from stageline.inference.replicas.link import Link
from stageline.inference.replicas.remote_engine import RemoteEngine
from stageline.inference.replicas.router import Engine, ReplicaRouter

PATIENCE = 20.0


class ToldEngine:
    """An engine that says what the test has it say, in the thread that runs it.

    Attributes:
        requests, listeners: by the keys of what was handed in.
        refusal: what `submit` raises.
        fault: what `run` raises when it is stopped.
    """

    processor, model_name, max_length, matchers = None, "told", 100, None

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.listeners: dict[str, Listener] = {}
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.fault: Exception | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def submit(self, request: Request, listener: Listener) -> None:
        """Keeps a request."""
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.key] = request
        self.listeners[request.key] = listener

    def say(self, event: Any) -> None:
        """Has an event told to the listener of its request."""
        self._jobs.put(lambda: self.listeners[event.key](event))

    def cancel(self, key: str) -> None:
        """Ends a request."""
        self.cancelled.append(key)
        self.say(end(key, "cancelled"))

    def stop(self) -> None:
        """Ends `run`."""
        self._jobs.put(None)

    def break_down(self, error: Exception) -> None:
        """Has `run` raise."""
        self.fault = error
        self._jobs.put(None)

    def run(self) -> None:
        """Says what it is told to, until `stop`."""
        while (job := self._jobs.get()) is not None:
            job()
        if self.fault is not None:
            raise self.fault

    def prepare(self) -> None:
        """Nothing is to be measured."""

    def stats(self) -> EngineStats:
        """So many requests, and figures of no meaning."""
        count = len(self.requests)
        return EngineStats(count, count, 4, 10, 20, 1, 5, None, self.fault is None, (1.5,))


class Heard(dict[str, list[Any]]):
    """key -> the events that its listener got."""

    def listener(self, key: str) -> Listener:
        """One that notes what it hears."""
        self[key] = []
        return self[key].append

    def has_ended(self, key: str) -> bool:
        """Whether the last event was no piece."""
        return bool(self[key]) and not isinstance(self[key][-1], Piece)


def ask(key: str, length: int = 3, **sampling: Any) -> Request:
    """A request with a prompt of so many tokens."""
    return Request(key, {"input_ids": torch.arange(length)[None]}, Sampling(**sampling))


def piece(key: str, text: str) -> Piece:
    """A part of an answer, with log-probabilities."""
    return Piece(key, text, (len(text),), (TokenLogprob(7, -0.25, ((7, -0.25), (8, -1e30))),))


def end(key: str, reason: Any = "stop") -> Finished:
    """The end of an answer."""
    return Finished(key, reason, 3, 2, "a text", (1, 2), stopped_by="." if reason == "stop" else 4)


def wait_until(is_so: Callable[[], Any]) -> None:
    """Waits for another thread."""
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.001)


@contextlib.contextmanager
def remote(engine: Engine, errors: list[Exception], *, number: int = 1) -> Iterator[RemoteEngine]:
    """`engine` as another process would run it, behind a link.

    Args:
        errors: gets what the other process would end with.
    """
    ours, theirs = map(Link, socket.socketpair())

    def host() -> None:
        try:
            host_engine(engine, theirs)
        except Exception as error:
            errors.append(error)  # a process that ends may take a while

    with _in_thread(host):
        yield RemoteEngine(
            ours, name=f"replica {number}", max_length=90, stats=ToldEngine().stats()
        )
        ours.close()


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[tuple[ReplicaRouter, list[Exception]]]:
    """A router that runs, and a list that gets what its `run` raised."""
    router, raised = ReplicaRouter(engines), list[Exception]()

    def run() -> None:
        try:
            router.run()
        except Exception as error:
            raised.append(error)

    with _in_thread(run):
        try:
            yield router, raised
        finally:
            router.stop()


@contextlib.contextmanager
def _in_thread(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()
