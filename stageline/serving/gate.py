"""What every request passes first: keys, counting, and the last net for errors. Plain ASGI."""

import hmac
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from stageline.serving.errors import ApiError, ClientGone
from stageline.serving.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEALTH = "/health"  # open to everybody
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", HEALTH, "/metrics", "/")
CLIENT_GONE = 499


class Gate:
    """Lets requests with a key through to an app, and sees how they end.

    Args:
        api_keys: none: everybody may ask.
        open_paths: need no key, as /health does not.
    """

    def __init__(
        self, app: App, *, api_keys: Sequence[str], open_paths: Iterable[str], metrics: Metrics
    ) -> None:
        self.app = app
        self.open_paths = frozenset([HEALTH, *open_paths])
        self.keys = [key.encode() for key in api_keys]
        self.metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = CLIENT_GONE, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not self._may_pass(scope):
                await _refusal()(scope, receive, noting)
            else:
                await self.app(scope, receive, noting)
        except ClientGone:
            status = CLIENT_GONE
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if status == CLIENT_GONE:  # nothing was sent yet
                error = ApiError(500, "The server has failed; its log says more.", code="internal")
                await error.response()(scope, receive, noting)
        finally:
            self.metrics.see_request(_route(scope["path"]), status, time.monotonic() - began)

    def _may_pass(self, scope: Message) -> bool:
        if not self.keys or scope["path"] in self.open_paths:
            return True
        # a browser asks first, without a key, whether a page elsewhere may
        headers = dict(scope["headers"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # each is compared, so that time tells nothing
        found = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return scheme.lower() == b"bearer" and any(found)


def _refusal() -> Any:
    return ApiError(
        401,
        "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    ).response()


def _route(path: str) -> str:
    """The path, if there is something; clients must not make up label values."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in ROUTES else "other"
