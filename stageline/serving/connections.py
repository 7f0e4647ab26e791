"""Connections of the HTTP server: how many, and how long each may take to say what it wants.

uvicorn waits for ever for the head of a request, and its `limit_concurrency` refuses new requests
while slow connections stay. Here a connection without a request under way has so many seconds,
and is the first to go where there are too many.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from stageline.serving.errors import ApiError, too_busy
from stageline.serving.gate import Message, Receive, Send
from stageline.serving.settings import HttpSettings


class Connections:
    """All connections of a server, in one event loop.

    Attributes:
        idle: those without a request under way; who waits longest comes first.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def enter(self, new: "Connection") -> bool:
        """Counts a connection; False: all others have requests under way, and are too many."""
        self._open.add(new)
        if len(self._open) <= self.settings.max_connections:
            return True
        oldest = next((one for one in self.idle if not one.is_sending), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.transport.abort()
        return True

    def leave(self, one: "Connection") -> None:
        """A connection ends; a second time does nothing."""
        self._open.discard(one)
        self.idle.pop(one, None)


class Connection(H11Protocol):
    """A connection with limits; uvicorn makes one for each client."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all = connections
        self._inner_app, self.app = self.app, self._answer  # type: ignore[method-assign]
        self._num_under_way = 0
        self._num_left = 0  # bytes of the last answer that nobody has taken yet
        self._timer: asyncio.TimerHandle | None = None
        self._may_ask = True

    @property
    def is_sending(self) -> bool:
        """Whether some of the last answer has not gone out."""
        return bool(self.transport.get_write_buffer_size())

    def connection_made(self, transport: Any) -> None:
        """Somebody is there."""
        super().connection_made(transport)
        self._may_ask = self._all.enter(self)
        self._wait(self._all.settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._stop_waiting()
        self._all.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        self._stop_waiting()
        self._num_under_way += 1
        try:
            if self._may_ask:
                await self._inner_app(scope, receive, send)  # type: ignore[arg-type]
            else:
                await _too_many().response()(scope, receive, send)
        finally:
            self._num_under_way -= 1
            if not self._num_under_way and not self._is_lost:
                settings = self._all.settings
                self._wait(settings.keep_alive_seconds + settings.header_seconds)

    @property
    def _is_lost(self) -> bool:
        return self not in self.connections

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._all.idle[self] = None
        self._timer = self.loop.call_later(seconds, self._time_is_over, seconds)

    def _stop_waiting(self) -> None:
        self._all.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_over(self, seconds: float) -> None:
        num_left = self.transport.get_write_buffer_size()
        if 0 < num_left != self._num_left:  # it is slow, but takes what it asked for
            self._num_left = num_left
            self._wait(seconds)
        elif num_left or self.transport.is_closing():
            self.transport.abort()
        elif self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"The head of the request did not arrive within {seconds:g} s."
            self._refuse(ApiError(408, text, code="header_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers by itself, and hangs up."""
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = h11.Response(
            status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _too_many() -> ApiError:
    error = too_busy("Too many connections are open.", code="too_many_connections")
    error.headers["Connection"] = "close"
    return error
