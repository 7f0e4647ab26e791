"""What every request passes first: keys, counting, the last net for errors; reading bodies."""

import asyncio
import hmac
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from stageline.serving.errors import ApiError, ClientGone, bad_request, too_busy
from stageline.serving.request_queue import Metrics
from stageline.serving.settings import MIB

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


class ByteBudget:
    """A number of bytes that is given out and taken back, in one event loop.

    Args:
        most: never more is given out; nobody may ask for more at once.

    Attributes:
        num_taken: given out now.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Waits until so many bytes are free."""
        if not self._waiting and self.num_taken + size <= self.most:
            self.num_taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # it had just become ours
            else:
                self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                self.give(0)  # who waited behind may fit
            raise

    def give(self, size: int) -> None:
        """Gives bytes back."""
        self.num_taken -= size
        while self._waiting and self.num_taken + self._waiting[0][0] <= self.most:
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_taken += wanted
                turn.set_result(None)


Model = TypeVar("Model", bound=BaseModel)
BODIES_AT_ONCE = 8
SMALL_BODY = 65536  # not worth counting
NOT_AS_DOCUMENTED = "invalid_request"  # what the OpenAPI document would have told
# so that a client that sends first and listens then hears why; not more
MAX_DRAINED_BYTES = 64 * MIB
DRAIN_SECONDS = 5.0


class Body:
    """The body of a request, until it has become a prompt."""

    def __init__(self, content: bytes, budget: ByteBudget, num_bytes: int) -> None:
        self.content = content
        self._budget = budget
        self._num_bytes = num_bytes

    def free(self) -> None:
        """Forgets it, so that others may come in; a second time does nothing."""
        self.content = b""
        self._budget.give(self._num_bytes)
        self._num_bytes = 0


class BodyReader:
    """Reads bodies. All large ones that are held at one time have a limit, too; the rest waits.

    Args:
        max_bytes: of one body.
        seconds: for one body to arrive.
    """

    def __init__(self, max_bytes: int, *, seconds: float) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.budget = ByteBudget(BODIES_AT_ONCE * max_bytes)

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
        reserved = 0 if size <= SMALL_BODY else size
        try:
            async with asyncio.timeout(self.seconds):
                await self.budget.take(reserved)
        except TimeoutError:
            raise too_busy("Too many large requests arrive at this moment.") from None
        try:
            async with asyncio.timeout(self.seconds):
                return Body(await self._read(request), self.budget, reserved)
        except BaseException as error:
            self.budget.give(reserved)
            if isinstance(error, ClientDisconnect):
                raise ClientGone from None
            if isinstance(error, TimeoutError):
                raise self._too_slow() from None
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

    def _too_slow(self) -> ApiError:
        message = f"The body did not arrive within {self.seconds:g} s."
        return ApiError(408, message, code="body_timeout")

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
    """The body as a model.

    Raises:
        ApiError: it is no JSON, or not what the model is.
    """
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
