"""An engine in another process, as if it were here: requests go over a link, events come back."""

import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.decoding.request import EngineError, Failed, Listener, Piece, Request
from stageline.inference.replicas.link import Link, Message
from stageline.inference.replicas.plain import as_plain, of_plain


class RemoteEngine:
    """The engine of another replica; `host_engine` is its other side.

    Its statistics are those of a moment ago. Listeners are called in a thread of its own.

    Args:
        name: for errors, `replica 1`.
        stats: what it says of itself before it has said anything.
    """

    def __init__(
        self, link: Link, *, name: str, max_length: int | None, stats: EngineStats
    ) -> None:
        self.name = name
        self.max_length = max_length
        self._link = link
        self._stats = stats
        self._listeners: dict[str, Listener] = {}
        self._door = threading.Lock()
        self._is_over = False
        self._has_ended = False  # as it was told to
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Sends a request; what is wrong with it is told to the listener.

        Raises:
            EngineError: the other process is gone.
            TypeError: it holds what can't be sent.
        """
        plain = as_plain(request)
        with self._door:
            if self._is_over:
                raise EngineError(f"{self.name} is gone")
            self._listeners[request.key] = listener
        try:
            self._link.send({"do": "submit", "request": plain}, request.prompt)
        except BaseException:
            self._listeners.pop(request.key, None)
            raise

    def cancel(self, key: str) -> None:
        """Ends a request, if it still runs."""
        if key in self._listeners:
            self._link.send({"do": "cancel", "key": key})

    def stop(self) -> None:
        """Has the other engine stop; `run` returns when it has."""
        self._link.send({"do": "stop"})

    def stats(self) -> EngineStats:
        """What the other engine said last; an end shows at once."""
        return replace(self._stats, is_healthy=self._stats.is_healthy and not self._is_over)

    def run(self) -> None:
        """Waits until the other engine has stopped.

        Raises:
            ConnectionError: its process is gone.
        """
        self._reader.join()
        self._link.close()
        if not self._has_ended:
            raise ConnectionError(f"connection closed by {self.name}")

    def _read(self) -> None:
        for message, _ in self._link.messages():
            self._take(message)
            if not self._stats.is_healthy:  # its process is about to end, and may take a while
                break
        with self._door:
            self._is_over = True
            left, self._listeners = self._listeners, {}
        how = "was stopped" if self._has_ended else "is gone"
        for key, listener in left.items():
            _call(listener, Failed(key, EngineError(f"{self.name} {how}")))

    def _take(self, message: Message) -> None:
        if message["do"] == "stats":
            self._stats = stats_of(message["stats"])
        elif message["do"] == "ended":
            self._has_ended = True
        else:
            self._hand_on(of_plain(message["event"]))

    def _hand_on(self, event: Any) -> None:
        is_piece = isinstance(event, Piece)
        with self._door:
            keys = self._listeners
            listener = keys.get(event.key) if is_piece else keys.pop(event.key, None)
        # as with an engine of this process: who raises hears nothing more
        if listener is not None and not _call(listener, event) and is_piece:
            with self._door:
                self._listeners[event.key] = lambda _: None
            self.cancel(event.key)


def stats_of(plain: Mapping[str, Any]) -> EngineStats:
    """Statistics as they come over a link."""
    tuples = {name: tuple(one) for name, one in plain.items() if isinstance(one, list)}
    return EngineStats(**{**plain, **tuples})


def _call(listener: Listener, event: Any) -> bool:
    try:
        listener(event)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True
