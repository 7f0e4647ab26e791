"""What every request passes first: keys, counting, the last net for errors; reading bodies."""

import asyncio
import hmac
import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageline.serving.errors import ApiError, ClientGone, bad_request, too_busy
from stageline.serving.request_queue import Metrics
from stageline.serving.settings import MIB

HEALTH = "/health"  # open to everybody
ASKED = ("/v1/chat/completions", "/v1/completions")
ROUTES = (*ASKED, "/v1/models", HEALTH, "/metrics", "/")
CLIENT_GONE = 499
_NAME, _PLAIN = b"x-request-id", re.compile(rb"[A-Za-z0-9._-]{1,128}")


REFUSAL = ApiError(
    401,
    "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`.",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


class Gate:
    """Lets requests with a key through to an app, and sees how they end.

    Args:
        api_keys: none: everybody may ask.
        open_paths: need no key, as /health does not.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        open_paths: Iterable[str],
        metrics: Metrics,
    ) -> None:
        self.app = app
        self.open_paths = frozenset([HEALTH, *open_paths])
        self.keys = [key.encode() for key in api_keys]
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = CLIENT_GONE, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = _request_name(scope)
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        try:
            if not self._may_pass(scope):
                await REFUSAL.response()(scope, receive, noting)
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

    def _may_pass(self, scope: Scope) -> bool:
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


def _request_name(scope: Scope) -> tuple[bytes, bytes]:
    """The header that names a request: as the client did, or a name of ours."""
    given = dict(scope["headers"]).get(_NAME, b"")
    return _NAME, given if _PLAIN.fullmatch(given) else f"req_{secrets.token_hex(12)}".encode()


def _route(path: str) -> str:
    """The path, if there is something; clients must not make up label values."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{model}"
    return path if path in ROUTES else "other"


Model = TypeVar("Model", bound=BaseModel)
BODIES_AT_ONCE = 8
COUNTED_SHARE = 1 / 16  # of the largest body: smaller ones are not counted
NOT_AS_DOCUMENTED = "invalid_request"  # what the OpenAPI document would have told
# so that a client that sends first and listens then hears why; not more
MAX_DRAINED_BYTES = 64 * MIB
DRAIN_SECONDS = 5.0


class Body:
    """The body of a request, until it has become a prompt.

    Args:
        room: a place in it is taken until the body is freed.
    """

    def __init__(self, room: asyncio.Semaphore | None) -> None:
        self.content = b""
        self._room = room

    def free(self) -> None:
        """Forgets it, so that others may come in; a second time does nothing."""
        if self._room is not None:
            self._room.release()
        self.content, self._room = b"", None


class BodyReader:
    """Reads bodies. So many large ones are held at one time; the rest waits.

    Args:
        max_bytes: of one body.
        seconds: for one body to arrive.
    """

    def __init__(self, max_bytes: int, *, seconds: float) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.room = asyncio.Semaphore(BODIES_AT_ONCE)

    async def __call__(self, request: Request) -> Body:
        """The whole body; who gets it has to free it.

        Raises:
            ApiError: it is too large (413), too slow (408), or too many wait (503).
            ClientGone: nobody sends it any more.
        """
        announced = request.headers.get("content-length", "")
        size = int(announced[:20]) if announced.isdecimal() else self.max_bytes
        if size > self.max_bytes:
            await drain(request)
            raise self._too_large()
        room = self.room if size > COUNTED_SHARE * self.max_bytes else None
        if room is not None:
            try:
                async with asyncio.timeout(self.seconds):
                    await room.acquire()
            except TimeoutError:
                raise too_busy("Too many large requests arrive at this moment.") from None
        body = Body(room)
        try:
            async with asyncio.timeout(self.seconds):
                body.content = await self._read(request)
            return body
        except BaseException as error:
            body.free()
            if isinstance(error, ClientDisconnect):
                raise ClientGone from None
            if isinstance(error, TimeoutError):
                message = f"The body did not arrive within {self.seconds:g} s."
                raise ApiError(408, message, code="body_timeout") from None
            raise

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                break
        else:
            return bytes(body)
        del body
        await drain(request)
        raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self.max_bytes} bytes, which is the most that is taken.",
            code="body_too_large",
            headers={"Connection": "close"},
        )


async def drain(request: Request) -> None:
    """Lets the rest of a body pass, for a while; keeps nothing of it."""
    passed = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while passed < MAX_DRAINED_BYTES:
                message = await request.receive()
                passed += len(message.get("body", b""))
                if message["type"] == "http.disconnect":
                    raise ClientGone
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def check_content_type(request: Request) -> None:
    """Refuses what says that it is no JSON; a form of another site can't send JSON unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"The content type is {kind[:80]!r}; application/json was expected.",
            code="unsupported_media_type",
        )


def parse(body: bytes, model: type[Model]) -> Model:
    """The body as a model, or an ApiError that names the field."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The body is no JSON: {error}.", code="invalid_json") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _of_validation(error, value) from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def _of_validation(error: ValidationError, value: Any) -> ApiError:
    # of a union each member complains: the one that got farthest is what was meant
    found = max(
        error.errors(include_url=False, include_input=False, include_context=False)[:100],
        key=lambda item: (item["type"] == "value_error", len(item["loc"])),
    )
    where = ".".join(map(str, _path(found["loc"], value)))[:200]
    text = _SAID.get(found["type"]) or found["msg"].removeprefix("Value error, ")
    return bad_request(
        f"{where or 'The body'}: {text}.", param=where or None, code=NOT_AS_DOCUMENTED
    )


_SAID = {
    "extra_forbidden": "this field is not known here; leave it out",
    "missing": "this field is missing",
}


def _path(parts: Sequence[Any], value: Any) -> list[Any]:
    """The way to what is wrong, without the names that pydantic gives to members of unions."""
    path = []
    for number, part in enumerate(parts):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif not (number == len(parts) - 1 and isinstance(value, dict)):
            continue
        path.append(part)
    return path
