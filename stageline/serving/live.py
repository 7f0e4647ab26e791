"""A response that is made while somebody waits for it, whole or event by event.

Who goes away ends the work, also while it waits in a queue. What takes too long ends, too. An
error before the first byte has its own status; after that it is an event.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from stageline.serving.errors import ApiError, ClientGone
from stageline.serving.gate import Message, Receive, Send

SECONDS_TO_SAY_GOODBYE = 5.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not wait for more
]


class Out:
    """Where an answer goes.

    Attributes:
        is_started: a status was sent, so there can be no other.
        is_stream: errors can be events.
        forget: frees the body of the request.
    """

    def __init__(
        self, scope: Message, receive: Receive, send: Send, forget: Callable[[], None]
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.is_started = False
        self.is_stream = False
        self.forget = forget

    async def whole(self, body: dict[str, Any]) -> None:
        """Sends the answer in one."""
        self.is_started = True
        await JSONResponse(body)(self._scope, self._receive, self._send)

    async def event(self, body: dict[str, Any]) -> None:
        """Sends an event of a stream."""
        # ASCII: some clients end lines at signs that only Unicode takes for line ends
        await self._write(f"data: {json.dumps(body, separators=(',', ':'))}\n\n")

    async def end_stream(self) -> None:
        """Sends what ends a stream."""
        await self._write("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, text: str) -> None:
        if not self.is_started:
            self.is_started = self.is_stream = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})


class LiveResponse(Response):
    """Runs some work that writes the answer.

    Args:
        work: writes into an `Out`.
        seconds: for all of it.
        forget: frees the body of the request; called in any case.
    """

    def __init__(
        self,
        work: Callable[[Out], Awaitable[None]],
        *,
        seconds: float,
        forget: Callable[[], None],
    ) -> None:
        super().__init__()
        self.work = work
        self.seconds = seconds
        self.forget = forget

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends the answer.

        Raises:
            ApiError: nothing was sent yet.
            ClientGone: nobody waits any more.
        """
        out = Out(scope, receive, send, self.forget)
        try:
            async with asyncio.timeout(self.seconds):
                await while_listening(receive, self.work(out))
            return
        except TimeoutError:
            error = _too_slow(self.seconds)
        except ApiError as caught:
            error = caught
        finally:
            self.forget()
        if not out.is_started:
            raise error
        if not out.is_stream:  # it was sent, and not read
            raise ClientGone
        try:
            async with asyncio.timeout(SECONDS_TO_SAY_GOODBYE):
                await out.event(error.body())
                await out.end_stream()
        except TimeoutError:
            raise ClientGone from None


async def while_listening(receive: Receive, work: Awaitable[None]) -> None:
    """Does some work unless the client goes away.

    Raises:
        ClientGone: it has; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"The answer was not done within {seconds:g} s, which is the server's limit. Ask for less.",
        code="timeout",
        headers={"x-should-retry": "false"},  # it would take as long again
    )
