"""Messages between two processes of one machine over a socket, in their order.

A message is a line of JSON, and behind it the bytes of its tensors. Sending never waits: a thread
writes, so that neither an event loop nor an engine depends on how quickly the other side reads.
"""

import contextlib
import io
import json
import math
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Message = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Part = bytes | memoryview
_KINDS = "tensors"


class Link:
    """One end of a connection.

    Args:
        connection: a connected socket, which is closed with the link.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._out: queue.SimpleQueue[list[Part] | threading.Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="link", daemon=True)
        self._writer.start()

    def send(self, message: Message, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Hands a message to the writer; any thread. Where the other side is gone it is lost."""
        flat = {name: one.detach().cpu() for name, one in (tensors or {}).items()}
        kinds = [[name, str(one.dtype)[6:], list(one.shape)] for name, one in flat.items()]
        line = json.dumps({**message, _KINDS: kinds} if kinds else message) + "\n"
        self._out.put([line.encode(), *(_bytes_of(one) for one in flat.values())])

    def messages(self) -> Iterator[tuple[Message, Tensors]]:
        """What comes, until the other side is gone; for one thread."""
        with contextlib.suppress(OSError, ValueError, EOFError):  # reset, closed here, cut off
            while (line := self._file.readline()).endswith(b"\n"):
                message = json.loads(line)
                kinds = message.pop(_KINDS, ())
                tensors = {name: _read(self._file, kind, shape) for name, kind, shape in kinds}
                yield message, tensors

    def flush(self, seconds: float) -> bool:
        """Waits until what was sent so far is written; False: it takes longer."""
        is_written = threading.Event()
        self._out.put(is_written)
        return is_written.wait(seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Writes what was sent, then hangs up; `messages` ends."""
        self._out.put(None)
        self._writer.join(seconds)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self) -> None:
        is_open = True
        while (parts := self._out.get()) is not None:
            if isinstance(parts, threading.Event):
                parts.set()
            elif is_open:
                try:
                    for part in parts:
                        self._socket.sendall(part)
                except OSError:  # the reader notices, and tells
                    is_open = False


def _bytes_of(tensor: torch.Tensor) -> Part:
    flat = tensor.reshape(-1)  # a copy, where it does not lie in one piece
    return memoryview(flat.view(torch.uint8).numpy()) if len(flat) else b""


def _read(file: io.BufferedReader, kind: str, shape: list[int]) -> torch.Tensor:
    dtype = getattr(torch, kind)
    content = bytearray(math.prod(shape) * dtype.itemsize)
    if not content:
        return torch.empty(shape, dtype=dtype)
    if file.readinto(content) < len(content):
        raise EOFError
    return torch.frombuffer(content, dtype=dtype).reshape(shape)
