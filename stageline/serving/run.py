"""Runs a server: HTTP in a thread, the engine in this one, until somebody asks for a stop.

A stop ends in order: nothing more is taken, what is under way may finish for a while, the rest is
cancelled, then the engine stops.
"""

import asyncio
import contextlib
import functools
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from stageline.errors import UserError
from stageline.serving.connections import Connection, Connections
from stageline.serving.desk import Desk, Engine
from stageline.serving.service import Service
from stageline.serving.settings import HttpSettings

SECONDS_TO_LOOK = 0.1
SECONDS_TO_CANCEL = 5.0
SECONDS_TO_CLOSE = 3.0
_BACKLOG = 1024
_PLAIN = HttpSettings()


class _Server(uvicorn.Server):
    """Gives a handshake no more time than the head of a request; asyncio's own limit is 60 s."""

    async def startup(self, *args: Any, **kwargs: Any) -> None:
        loop: Any = asyncio.get_running_loop()
        if self.config.is_ssl:
            seconds = self.config.http.keywords["connections"].settings.header_seconds
            loop.create_server = functools.partial(
                loop.create_server, ssl_handshake_timeout=seconds
            )
        await super().startup(*args, **kwargs)


@contextlib.contextmanager
def http_server(
    app: FastAPI, host: str, port: int, *, http: HttpSettings = _PLAIN
) -> Iterator[str]:
    """Serves an app in a thread; gives its address. Port 0 takes a free one.

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
        timeout_keep_alive=http.keep_alive_seconds,  # type: ignore[arg-type]
        http=functools.partial(Connection, connections=Connections(http)),  # type: ignore[arg-type]
        loop="asyncio",
        ssl_certfile=http.certfile,
        ssl_keyfile=http.keyfile,
    )
    server = _Server(config)
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
    """A socket that listens.

    Raises:
        UserError: says what is in the way.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--host {host} --port {port} can't be listened at ({error.strerror or error}). An "
            "address of this machine and a free port were expected: choose another --port (0 "
            "takes a free one), or end what uses it."
        ) from error
    return listener


def is_local(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_until(
    service: Service,
    app: FastAPI,
    *,
    host: str,
    port: int,
    should_stop: Callable[[], bool],
    shutdown_seconds: float,
    tell: Callable[[str], object] = print,
    http: HttpSettings = _PLAIN,
) -> None:
    """Serves until a stop is asked for; the engine runs in this thread.

    Args:
        should_stop: asked several times a second, in another thread.
        shutdown_seconds: what is under way may take so long to finish.
        tell: gets the line that says where the server is.
        http: how it listens.

    Raises:
        UserError: the port can't be had.
        Exception: what the engine raises.
    """
    engine, desk = service.engine, service.desk
    with http_server(app, host, port, http=http) as url:
        tell(f"serving {service.settings.model_name} at {url}/v1")
        is_over = threading.Event()
        watch = threading.Thread(
            target=_watch, args=(engine, desk, should_stop, shutdown_seconds, is_over), daemon=True
        )
        watch.start()
        try:
            engine.run()
        finally:
            desk.is_closed = True
            is_over.set()
            watch.join(SECONDS_TO_CANCEL)


def _watch(
    engine: Engine,
    desk: Desk,
    should_stop: Callable[[], bool],
    shutdown_seconds: float,
    is_over: threading.Event,
) -> None:
    while not should_stop():
        if is_over.wait(SECONDS_TO_LOOK):
            return
    desk.is_closed = True
    _wait_until(lambda: desk.num_places == 0 or is_over.is_set(), shutdown_seconds)
    desk.cancel_all()
    _wait_until(lambda: desk.num_places == 0 or is_over.is_set(), SECONDS_TO_CANCEL)
    engine.stop()


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(SECONDS_TO_LOOK / 4)
