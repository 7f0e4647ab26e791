"""Errors as clients get them: OpenAI's JSON shape, a status for each kind, no path and no trace."""

import sys
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stageline.errors import MemoryFull, UserError
from stageline.inference.decoding.request import Cancelled

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered: `param` is the field to blame, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": _TYPES.get(status, kind), "param": param, "code": code}
        self.body = {"error": error}  # OpenAI's error object

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


class ClientGone(Exception):
    """The client closed its connection before the answer."""


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can't be answered as it is, for the field `param`."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, *, status: int = 503, code: str = "overloaded") -> ApiError:
    """Return the error of a request that may be answered a little later."""
    return ApiError(status, message, code=code, headers={"Retry-After": "1"})


def of_engine(error: Exception) -> ApiError:
    """Return what a client is told of an error of the engine; the log has the rest."""
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, Cancelled):
        return too_busy("The answer was cancelled.", code="cancelled")
    print(f"the engine failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if isinstance(error, MemoryFull):
        return too_busy("The memory for answers is full. Ask again later, or for less.")
    message = f"The engine failed with this request ({type(error).__name__}); the log says more."
    return ApiError(500, message, code="engine_error")


def add_error_handlers(app: FastAPI) -> None:
    """Give errors of FastAPI OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> JSONResponse:
        words = {404: "There is nothing at", 405: "This method is not known at"}
        message = f"{words.get(error.status_code, error.detail)} {request.url.path[:200]}."
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        headers = dict(error.headers or {})
        return ApiError(error.status_code, message, code=code, headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        # each member of a union complains: the one that got farthest was meant
        found = max(
            error.errors()[:100], key=lambda item: (item["type"] == "value_error", len(item["loc"]))
        )
        where = _path(found["loc"][1:], error.body)
        text = {
            "extra_forbidden": "this field is not known here; leave it out",
            "missing": "this field is missing",
            "none_required": "this server does not support it; leave it out",
        }.get(found["type"], found["msg"].removeprefix("Value error, "))
        message = f"{where or 'The body'}: {text}."
        return bad_request(message, param=where or None, code="invalid_request").response()


def _path(parts: Sequence[Any], value: Any) -> str:
    """Return the way to a field, without the names that pydantic gives to members of unions."""
    path = []
    for number, part in enumerate(parts):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif not (number == len(parts) - 1 and isinstance(value, dict)):
            continue
        path.append(str(part))
    return ".".join(path)[:200]
