"""Errors as clients get them: OpenAI's JSON shape, a status for each kind, no path and no trace."""

import sys
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stageline.errors import MemoryFull, UserError
from stageline.inference.decoding.request import Cancelled

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
RETRY_SECONDS = 1


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
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """As a response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that can't be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str, *, status: int = 503, code: str = "overloaded") -> ApiError:
    """A request that may be answered a little later."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def of_engine(error: Exception) -> ApiError:
    """What a client is told of an error of the engine; the log gets what it is not told."""
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
    """Makes every error of the routes one of OpenAI's."""

    @app.exception_handler(ApiError)
    async def of_api(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> JSONResponse:
        words = {404: "There is nothing at", 405: "This method is not known at"}
        message = f"{words.get(error.status_code, error.detail)} {request.url.path[:200]}."
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        told = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
        return told.response()
