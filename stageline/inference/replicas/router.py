"""One engine made of several: each request goes to the one that has least to do.

It has the interface of a `DecodingEngine` that a server needs. When one engine breaks down, every
request gets an error and `run` raises: a server of half its replicas would look well.
"""

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from stageline.errors import UserError
from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.decoding.prompts import length_of
from stageline.inference.decoding.request import EngineError, Failed, Listener, Piece, Request


class Engine(Protocol):
    """What is asked of each replica."""

    max_length: int | None

    def submit(self, request: Request, listener: Listener) -> None:
        """Takes a request; any thread."""

    def cancel(self, key: str) -> None:
        """Ends a request; any thread."""

    def run(self) -> None:
        """Works until `stop`."""

    def stop(self) -> None:
        """Ends `run`."""

    def stats(self) -> Any:
        """Numbers of a moment ago."""


@dataclass(frozen=True)
class RouterStats(EngineStats):
    """The sums over all replicas.

    Attributes:
        stage_seconds: of all replicas, one after the other.
        replicas: each one's own.
        num_given: requests that each was given since the start.
    """

    replicas: tuple[Any, ...] = ()
    num_given: tuple[int, ...] = ()


class _Load:
    """What a replica has to do."""

    def __init__(self) -> None:
        self.num_open = self.num_tokens = self.num_given = 0

    def as_order(self) -> tuple[int, int, int]:
        """The least comes first: of rows, of tokens they may have, of what it was given before."""
        return self.num_open, self.num_tokens, self.num_given

    def add(self, count: int, num_tokens: int) -> None:
        """A request comes (1) or goes (-1)."""
        self.num_open += count
        self.num_tokens += count * num_tokens
        self.num_given += max(0, count)


class _Open:
    """A request that runs; it hears nothing after its end, whoever tells it."""

    def __init__(self, router: "ReplicaRouter", request: Request, listener: Listener) -> None:
        self.router = router
        self.key = request.key
        self.num_tokens = length_of(request.prompt)
        if (sampling := getattr(request, "sampling", None)) is not None:  # a score has none
            self.num_tokens += sampling.max_new_tokens
        self.place = 0
        self._listener = listener
        self._is_over = self._is_deaf = False
        self._lock = threading.RLock()  # a listener may cancel, and so hear the end

    def hear(self, event: Any) -> None:
        """An event of its engine, or of the router."""
        with self._lock:
            if self._is_over:
                return
            if not isinstance(event, Piece):
                self._is_over = True
                self.router._close(self)
            if self._is_deaf:
                return
            try:
                self._listener(event)
            except Exception:  # as with a single engine: it ends as if cancelled
                traceback.print_exc(file=sys.stderr)
                self._is_deaf = True
                self.router.cancel(self.key)


class ReplicaRouter:
    """Shares requests out among engines.

    Args:
        engines: the first is driven by the thread that calls `run`; the others, which may stand
            for other processes, by threads of their own.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        first: Any = engines[0]
        self.processor = first.processor
        self.model_name = first.model_name
        self.matchers = first.matchers  # check grammars, the same for all
        known = [engine.max_length for engine in engines if engine.max_length is not None]
        self.max_length = min(known, default=None)
        self._loads = [_Load() for _ in engines]
        self._open: dict[str, _Open] = {}
        self._lock = threading.RLock()
        self._is_stopping = False
        self._error: BaseException | None = None

    # -- from any thread ------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> None:
        """Gives a request to the replica with the least to do; raises as an engine does."""
        one = _Open(self, request, listener)
        with self._lock:
            if self._error is not None or self._is_stopping:
                raise EngineError("the engine was stopped, or broke down")
            if one.key in self._open:
                raise UserError(f"the key {one.key!r} runs already: keys must differ")
            one.place = min(range(len(self._loads)), key=lambda i: self._loads[i].as_order())
            self._open[one.key] = one
            self._loads[one.place].add(1, one.num_tokens)
        try:
            self.engines[one.place].submit(request, one.hear)
        except BaseException:
            self._close(one)
            raise

    def cancel(self, key: str) -> None:
        """Ends a request, if it still runs."""
        with self._lock:
            one = self._open.get(key)
        if one is not None:
            self.engines[one.place].cancel(key)

    def stop(self) -> None:
        """Makes `run` return, when all replicas have stopped."""
        self._is_stopping = True
        for engine in self.engines:
            engine.stop()

    def stats(self) -> RouterStats:
        """The sums over all replicas, and each one's own."""
        parts = tuple(engine.stats() for engine in self.engines)
        sums = {field.name: _together(field.name, parts) for field in fields(EngineStats)}
        sums["is_healthy"] = sums["is_healthy"] and self._error is None
        given = tuple(load.num_given for load in self._loads)
        return RouterStats(**sums, replicas=parts, num_given=given)

    # -- in the thread of the first engine ------------------------------------------------

    def prepare(self) -> None:
        """What the first engine does before it answers; the others did it before they came."""
        first: Any = self.engines[0]
        first.prepare()

    def run(self) -> None:
        """Works until `stop`, or until an engine breaks down.

        The others then go on, until they miss this process: if they were stopped, their ranks would
        meet the lost one at the end, and tell of that before this one tells who was lost.

        Raises:
            Exception: what that engine raised.
        """
        others = [
            threading.Thread(target=self._drive, args=(engine,), daemon=True)
            for engine in self.engines[1:]
        ]
        for thread in others:
            thread.start()
        self._drive(self.engines[0])
        for thread in others:
            # one that hangs must not keep a cause from being told
            while thread.is_alive() and self._error is None:
                thread.join(0.05)
        if self._error is not None:
            raise self._error
        self._fail_all(EngineError("the engine was stopped"))

    def _drive(self, engine: Engine) -> None:
        try:
            engine.run()
        except BaseException as error:
            self._break_down(error)

    def _break_down(self, error: BaseException) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._fail_all(EngineError(f"a replica broke down: {error}"))
        self.engines[0].stop()

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            left = list(self._open.values())
        for one in left:
            one.hear(Failed(one.key, error))

    def _close(self, one: _Open) -> None:
        with self._lock:
            if self._open.get(one.key) is one:
                del self._open[one.key]
                self._loads[one.place].add(-1, one.num_tokens)


def _together(name: str, parts: Sequence[Any]) -> Any:
    """The figure of all replicas: true if all are, None if one has no limit, else the sum."""
    values = [getattr(part, name) for part in parts if hasattr(part, name)]
    if any(value is None for value in values):
        return None
    if values and isinstance(values[0], bool):
        return all(values)
    if values and isinstance(values[0], tuple):
        return sum(values, ())
    return sum(values)
