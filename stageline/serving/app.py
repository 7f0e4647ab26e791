"""The routes, and what all of them share."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from stageline.errors import UserError
from stageline.inference.decoding.engine import DecodingEngine
from stageline.serving.answers import (
    answer_chat,
    answer_completion,
    answer_detokenize,
    answer_tokenize,
)
from stageline.serving.api_models import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    TokenizeRequest,
    Tokens,
    TokensText,
)
from stageline.serving.errors import add_error_handlers
from stageline.serving.gate import Gate
from stageline.serving.request_queue import CONTENT_TYPE, RequestQueue
from stageline.serving.service import LiveResponse, Service

_REFS = "#/components/schemas/{model}"
_STATUSES = {
    400: "the request can't be answered as it is",
    401: "the API key is missing or wrong",
    404: "there is no such model or address",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "too many answers are under way: ask again later",
    500: "the server has failed",
    503: "the server can't answer now: ask again later",
    504: "the answer took too long",
}
READING = (401, 404, 500)
ASKING = tuple(_STATUSES)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may fail so."""
    return {status: {"model": ErrorBody, "description": _STATUSES[status]} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route's document says of its body; the route itself reads it with limits."""
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def stream_of(description: str) -> dict[str, Any]:
    """What a route's document says of its other answer, a stream: the schema of one event."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {"description": description, "content": {"text/event-stream": {"schema": event}}}


def make_document(
    app: FastAPI, models: list[type[BaseModel]], *, model_names: Sequence[str], has_keys: bool
) -> dict[str, Any]:
    """The OpenAPI document of an app.

    Args:
        models: of the bodies that routes read by themselves; they have a field `model`.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in models:
        schema = model.model_json_schema(ref_template=_REFS)
        schemas |= schema.pop("$defs", {})
        schema["properties"]["model"] = {"type": "string", "enum": list(model_names)}
        schemas[model.__name__] = schema
    if has_keys:
        scheme = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": scheme}
        for path, methods in document["paths"].items():
            for operation in methods.values():
                operation["security"] = [] if path == "/health" else [{"key": []}]
    return document


def make_app(service: Service) -> FastAPI:
    """The ASGI app of a service."""
    settings = service.settings
    # no /docs: its page would load scripts from elsewhere
    app = FastAPI(
        title="Stageline", version="1", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(_asking(service))
    app.include_router(_reading(service))
    add_error_handlers(app)

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = make_document(
                app,
                [asked.request for asked in _ASKED],
                model_names=service.model_names,
                has_keys=bool(settings.api_keys),
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way that FastAPI documents
    app.add_middleware(
        Gate,
        api_keys=settings.api_keys,
        open_paths=add_page(app),
        metrics=service.metrics,
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


class Asked(NamedTuple):
    """A route that reads a body and answers, whole or as a stream.

    Attributes:
        stream: what a stream of it has; empty: it has none.
    """

    path: str
    about: str
    request: type[BaseModel]
    answer: type[BaseModel]
    write: Callable[..., Any]
    stream: str = ""


_ASKED = (
    Asked(
        "/v1/chat/completions",
        "Answers a chat, OpenAI's way.",
        ChatRequest,
        ChatCompletion,
        answer_chat,
        "the answers, or their chunks",
    ),
    Asked(
        "/v1/completions",
        "Goes on with texts, OpenAI's way.",
        CompletionRequest,
        Completion,
        answer_completion,
        "the texts, or their chunks",
    ),
    Asked(
        "/tokenize",
        "The tokens of a text or of messages, vLLM's way.",
        TokenizeRequest,
        Tokens,
        answer_tokenize,
    ),
    Asked(
        "/detokenize",
        "The text of tokens, vLLM's way.",
        DetokenizeRequest,
        TokensText,
        answer_detokenize,
    ),
)


def _asking(service: Service) -> APIRouter:
    router = APIRouter()
    for asked in _ASKED:
        found = {"model": asked.answer, **(stream_of(asked.stream) if asked.stream else {})}
        router.add_api_route(
            asked.path,
            _answering(service, asked),
            methods=["POST"],
            name=asked.path.strip("/").removeprefix("v1/").replace("/", "_"),
            description=asked.about,
            response_model=None,
            responses={200: found, **errors(*ASKING)},
            openapi_extra=body_of(asked.request),
        )
    return router


def _answering(service: Service, asked: Asked) -> Callable[..., Any]:
    async def answer(request: Request) -> LiveResponse:
        write = partial(asked.write, service)
        return await service.respond(request, asked.request, write)

    return answer


def _reading(service: Service) -> APIRouter:
    router = APIRouter()
    base = service.settings.model_name
    shared = {
        "object": "model",
        "created": service.created,
        "owned_by": "stageline",
        "max_model_len": service.engine.max_length,
        "stageline": {
            "takes_images": service.takes_images,
            "max_length": service.engine.max_length,
            "max_tokens": service.settings.max_tokens_limit,
            "default_max_tokens": service.settings.default_max_tokens,
            "default_temperature": service.settings.default_temperature,
        },
    }
    cards: list[dict[str, Any]] = [
        {"id": name, "parent": None if name == base else base, **shared}
        for name in service.model_names
    ]

    @router.get("/v1/models", response_model=ModelList, responses=errors(*READING))
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": cards}

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(*READING))
    async def one_model(model: str) -> dict[str, Any]:
        """One model."""
        return cards[service.check_model(model)]

    @router.get("/health", response_model=Health, responses=errors(500, 503))
    async def health() -> dict[str, Any]:
        """Whether requests can be answered."""
        service.queue.check_open()
        stats = service.engine.stats()
        return {"status": "ok", "running": stats.running, "queued": stats.queued}

    @router.get(
        "/metrics",
        response_model=None,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **errors(401, 500),
        },
        response_class=Response,
    )
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    return router


# The chat page: a few files beside this one, served by the process that answers.
# Nothing is built and nothing comes from elsewhere: the page works without a network. Its headers
# forbid scripts, styles and requests of any other origin, and setting markup from text.

FOLDER = Path(__file__).parent / "web"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # pictures that a person attaches
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # the browser itself refuses innerHTML
        "trusted-types dompurify",  # but what the sanitizer made
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again with its tag: files change with the version
}
# what a browser fetches before a person can type a key: open even where the API is not
FILES = {
    "/" if path.name == "index.html" else f"/web/{path.relative_to(FOLDER).as_posix()}": path
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in KINDS
}


def add_page(app: FastAPI) -> frozenset[str]:
    """Mounts the page at `/` of an app, and its files under `/web/`.

    They are no part of the app's OpenAPI document.

    Returns:
        The page's paths, which are open to everybody.
    """
    for path, file in FILES.items():
        app.add_api_route(path, _endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)
    return frozenset(FILES)


def _endpoint(file: Path) -> Any:
    async def send() -> FileResponse:
        return FileResponse(file, media_type=KINDS[file.suffix], headers=HEADERS)

    return send


# Runs a server: HTTP in a thread, the engine in this one, until somebody asks for a stop.
# A stop ends in order: nothing more is taken, what is under way may finish for a while, the rest is
# cancelled, then the engine stops.

SECONDS_TO_LOOK = 0.1
SECONDS_TO_CANCEL = 5.0
SECONDS_TO_CLOSE = 3.0
_BACKLOG = 1024


@contextlib.contextmanager
def http_server(app: FastAPI, host: str, port: int, **listening: Any) -> Iterator[str]:
    """Serves an app in a thread; gives its address. Port 0 takes a free one.

    Args:
        listening: further options of uvicorn: certificate, limits of connections.

    Raises:
        UserError: the port can't be had.
    """
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would tell who asked what
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(SECONDS_TO_CLOSE),
        http="h11",
        loop="asyncio",
        **listening,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
    thread.daemon = True  # a fault in this thread must not wait for it
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        where = f"[{host}]" if ":" in host else host
        yield f"http{'s' * config.is_ssl}://{where}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(2 * SECONDS_TO_CLOSE)
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, or a UserError that says what is in the way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"`host` {host} `port` {port} can't be listened at ({error.strerror or error}). An "
            "address of this machine and a free port were expected: choose another `port` (0 "
            "takes a free one), or end what uses it."
        ) from error
    return listener


def serve_until(
    service: Service,
    app: FastAPI,
    *,
    host: str,
    port: int,
    should_stop: Callable[[], bool],
    shutdown_seconds: float,
    tell: Callable[[str], object] = print,
    **listening: Any,
) -> None:
    """Serves until a stop is asked for; the engine runs in this thread.

    Args:
        should_stop: asked several times a second, in another thread.
        shutdown_seconds: what is under way may take so long to finish.
        tell: gets the line that says where the server is.
        listening: as in `http_server`.

    Raises:
        UserError: the port can't be had.
        Exception: what the engine raises.
    """
    engine, queue = service.engine, service.queue
    with http_server(app, host, port, **listening) as url:
        tell(f"serving {service.settings.model_name} at {url}/v1")
        is_over = threading.Event()
        watch = threading.Thread(
            target=_watch, args=(engine, queue, should_stop, shutdown_seconds, is_over), daemon=True
        )
        watch.start()
        try:
            engine.run()
        finally:
            queue.is_closed = True
            is_over.set()
            watch.join(SECONDS_TO_CANCEL)


def _watch(
    engine: DecodingEngine,
    queue: RequestQueue,
    should_stop: Callable[[], bool],
    shutdown_seconds: float,
    is_over: threading.Event,
) -> None:
    while not should_stop():
        if is_over.wait(SECONDS_TO_LOOK):
            return
    queue.is_closed = True
    _wait_until(lambda: queue.num_places == 0 or is_over.is_set(), shutdown_seconds)
    queue.cancel_all()
    _wait_until(lambda: queue.num_places == 0 or is_over.is_set(), SECONDS_TO_CANCEL)
    engine.stop()


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(SECONDS_TO_LOOK / 4)
