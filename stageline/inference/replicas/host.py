"""Runs the engine of this process for the server in another one, over a link."""

import sys
import threading
import traceback
from dataclasses import fields
from typing import Any

from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.decoding.request import EngineError, Failed
from stageline.inference.replicas.link import Link, Message, Tensors
from stageline.inference.replicas.plain import as_plain, of_plain

SECONDS_BETWEEN_STATS = 0.25
SECONDS_TO_TELL = 2.0


def host_engine(engine: Any, link: Link) -> None:
    """Answers what comes over a link until the other side says stop.

    The engine runs in this thread.

    Args:
        engine: has the interface of a `DecodingEngine`.

    Raises:
        ConnectionError: the other side is gone.
        Exception: what the engine raises; its requests are told before.
    """
    host = _Host(engine, link)
    for work in (host.obey, host.tell_stats):
        threading.Thread(target=work, name="host", daemon=True).start()
    try:
        engine.run()
    except BaseException:
        host.is_over.set()
        host.tell_where_it_stands()
        link.flush(SECONDS_TO_TELL)  # before this process ends
        raise
    host.is_over.set()
    if not host.is_told_to_stop:
        raise ConnectionError("connection closed by the first replica, which serves")
    link.send({"do": "ended"})
    link.close(SECONDS_TO_TELL)


class _Host:
    """What runs beside the engine.

    Attributes:
        is_told_to_stop: the other side said so.
        is_over: the engine has stopped.
    """

    def __init__(self, engine: Any, link: Link) -> None:
        self.engine = engine
        self.link = link
        self.is_told_to_stop = False
        self.is_over = threading.Event()
        self._told: EngineStats | None = None

    def obey(self) -> None:
        """Does what comes over the link; when the other side is gone, the engine stops."""
        for message, tensors in self.link.messages():
            self._do(message, tensors)
        self.engine.stop()

    def _do(self, message: Message, tensors: Tensors) -> None:
        if message["do"] == "submit":
            self._submit(message["request"], tensors)
        elif message["do"] == "cancel":
            self.engine.cancel(message["key"])
        elif message["do"] == "stop":
            self.is_told_to_stop = True
            self.engine.stop()

    def _submit(self, plain: dict[str, Any], prompt: Tensors) -> None:
        try:
            self.engine.submit(of_plain(plain, prompt=prompt), self._tell)
        except Exception as error:
            self._tell(Failed(plain["key"], error))

    def _tell(self, event: Any) -> None:
        try:
            self.link.send({"do": "event", "event": as_plain(event)})
        except Exception as error:  # a listener that raises would hear nothing more
            traceback.print_exc(file=sys.stderr)
            failed = Failed(event.key, EngineError(f"an event can't be sent: {error}"))
            self.link.send({"do": "event", "event": as_plain(failed)})
            self.engine.cancel(event.key)

    def tell_stats(self) -> None:
        """Says what is new of the engine, a few times a second."""
        while not self.is_over.wait(SECONDS_BETWEEN_STATS):
            self.tell_where_it_stands()

    def tell_where_it_stands(self) -> None:
        """Sends the statistics, where they are others than the last ones."""
        stats = plain_stats(self.engine.stats())
        if stats != self._told:
            self._told = stats
            self.link.send({"do": "stats", "stats": stats})


def plain_stats(stats: Any) -> dict[str, Any]:
    """The statistics of an engine as plain values."""
    return {
        field.name: getattr(stats, field.name)
        for field in fields(EngineStats)
        if hasattr(stats, field.name)
    }
