"""The routes, the chat page, and the life of a server from its port to an orderly end."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from stageline.errors import UserError
from stageline.serving import answers
from stageline.serving import api_models as api
from stageline.serving.errors import add_error_handlers
from stageline.serving.gate import Gate
from stageline.serving.service import ResponseStream, Service


def make_app(service: Service) -> FastAPI:
    """Return the ASGI app of a service."""
    settings, engine = service.settings, service.engine
    # no /docs: its page would load scripts from elsewhere
    app = FastAPI(
        title="Stageline", version="1", docs_url=None, redoc_url=None, redirect_slashes=False
    )
    add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: api.ChatRequest) -> ResponseStream:
        """Answers a chat, OpenAI's way."""
        return service.respond(answers.answer_chat, asked)

    @app.post("/v1/completions")
    async def completions(asked: api.CompletionRequest) -> ResponseStream:
        """Continue texts, as OpenAI's API does."""
        return service.respond(answers.answer_completion, asked)

    @app.post("/tokenize")
    async def tokenize(asked: api.TokenizeRequest) -> ResponseStream:
        """The tokens of a text or of messages, vLLM's way."""
        return service.respond(answers.answer_tokenize, asked)

    @app.post("/detokenize")
    async def detokenize(asked: api.DetokenizeRequest) -> ResponseStream:
        """The text of tokens, vLLM's way."""
        return service.respond(answers.answer_detokenize, asked)

    abilities = {
        "takes_images": service.prompts.takes_images,
        "max_length": engine.max_length,
        "max_tokens": settings.max_tokens,
        "default_max_tokens": settings.default_max_tokens,
        "default_temperature": settings.default_temperature,
    }
    cards: list[dict[str, Any]] = [
        {
            "id": name,
            "parent": None if name == settings.model_name else settings.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "stageline",
            "max_model_len": engine.max_length,
            "stageline": abilities,
        }
        for name in service.model_names
    ]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        """One model."""
        return cards[service.check_model(model)]

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests can be answered."""
        service.queue.check_open()
        stats = engine.stats()
        return {"status": "ok", "running": stats.running, "queued": stats.queued}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    add_page(app)
    app.add_middleware(Gate, settings=settings, metrics=service.metrics)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


# The chat page: a few files in the folder web, served by the process that answers.
# Nothing is built and nothing comes from elsewhere: the page works without a network. Its headers
# forbid scripts, styles and requests of any other origin, and setting markup from text.

FOLDER = Path(__file__).parent / "web"
# images: those that a user attaches; trusted types: the browser itself refuses innerHTML except
# from the sanitizer
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again with its tag: files change with the version
}


class Page(StaticFiles):
    """The files of the page, with its headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Mount the page at `/` of an app, and its files under `/web/`; they are in no document."""
    app.mount("/web", Page(directory=FOLDER))

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)


# Run a server: HTTP in a thread, the engine in this one, until a stop is asked for.
# A stop has an order: new requests are refused, running ones may finish for a while, the rest is
# cancelled, then the engine stops.

SECONDS_TO_LOOK = 0.1
SECONDS_TO_CANCEL = 5.0
SECONDS_TO_CLOSE = 3.0


@contextlib.contextmanager
def http_server(app: FastAPI, host: str, port: int, **listening: Any) -> Iterator[str]:
    """Serve an app in a thread; give its address. Port 0 takes a free one.

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
    """Return a socket that listens, or raise a UserError that says what is in the way."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=1024,
            dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise UserError(
            f"`host` {host} `port` {port} can't be listened at ({error.strerror or error}). "
            "Choose another `port` (0 takes a free one), or end what uses it."
        ) from error


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
    """Serve until a stop is asked for; the engine runs in this thread and may raise.

    Args:
        should_stop: asked several times a second, in another thread.
        shutdown_seconds: what is under way may take so long to finish.
        tell: gets the line that says where the server is.
        listening: as in `http_server`.

    Raises:
        UserError: the port can't be had.
    """
    engine, queue, is_over = service.engine, service.queue, threading.Event()

    def wait_for_answers(seconds: float) -> None:
        until = time.monotonic() + seconds
        while queue.num_places and not is_over.is_set() and time.monotonic() < until:
            time.sleep(SECONDS_TO_LOOK / 4)

    def watch() -> None:
        while not should_stop():
            if is_over.wait(SECONDS_TO_LOOK):
                return
        queue.is_closed = True
        wait_for_answers(shutdown_seconds)
        queue.cancel_all()
        wait_for_answers(SECONDS_TO_CANCEL)
        engine.stop()

    with http_server(app, host, port, **listening) as url:
        tell(f"serving {service.settings.model_name} at {url}/v1")
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            engine.run()
        finally:
            queue.is_closed = True
            is_over.set()
            watcher.join(SECONDS_TO_CANCEL)
