"""Check each request first: its API key, the limits of its body; and count it."""

import asyncio
import hmac
import re
import secrets
import time
import traceback

from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageline.serving.errors import ApiError, ClientGone, bad_request
from stageline.serving.request_queue import Metrics
from stageline.serving.settings import MIB, ServerSettings

CLIENT_GONE = 499
MAX_DRAINED_BYTES = 64 * MIB
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """Middleware that lets requests in, reads their bodies and counts how they end."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        status, began = CLIENT_GONE, time.monotonic()
        name = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(name):
            name = f"req_{secrets.token_hex(12)}"

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            self._check_key(request)
            if request.method == "POST":
                receive = await self._read_body(request)
            await self.app(scope, receive, noting)
        except ApiError as error:
            await error.response()(scope, receive, noting)
        except ClientGone:
            status = CLIENT_GONE
        except Exception:
            traceback.print_exc()
            if status == CLIENT_GONE:  # nothing was sent yet
                failure = ApiError(500, "The server failed; its log says more.", code="internal")
                await failure.response()(scope, receive, noting)
        finally:
            # clients must not make up label values
            route = getattr(scope.get("route"), "path_format", "other")
            self.metrics.see_request(route, status, time.monotonic() - began)

    def _check_key(self, request: Request) -> None:
        path, keys = request.url.path, self.settings.api_keys
        # the page is open: a browser fetches it before a person can type a key
        if not keys or path in ("/", "/health") or path.startswith("/web/"):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # each is compared, so that the time says nothing about the keys
        found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        if not (scheme.lower() == "bearer" and any(found)):
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _read_body(self, request: Request) -> Receive:
        """Return a function that receives the body from memory.

        Raises:
            ApiError: it is too large (413), too slow (408) or not JSON (415, 400).
            ClientGone: the client closed its connection.
        """
        limit, seconds = int(self.settings.max_body_mib * MIB), self.settings.read_timeout
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        body += chunk
                    # the rest passes: a client that sends first and listens then hears why
                    elif size > limit + MAX_DRAINED_BYTES:
                        break
        except TimeoutError:
            message = f"The body did not arrive within {seconds:g} s."
            raise ApiError(408, message, code="body_timeout") from None
        except ClientDisconnect:
            raise ClientGone from None
        if size > limit:
            message, headers = f"The body has more than {limit} bytes.", {"Connection": "close"}
            raise ApiError(413, message, code="body_too_large", headers=headers)
        # a form of another site can't send JSON unasked
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            message = f"The content type is {kind[:80]!r}. Send application/json."
            raise ApiError(415, message, code="unsupported_media_type")
        messages: list[Message] = [{"type": "http.request", "body": bytes(body)}]
        try:  # FastAPI's reader takes NaN, and halves of surrogate pairs
            from_json(messages[0]["body"] or b"{}", allow_inf_nan=False)
        except ValueError as error:
            raise bad_request(f"The body is no JSON: {error}.", code="invalid_json") from None

        async def receive() -> Message:
            return messages.pop() if messages else await request.receive()

        return receive
