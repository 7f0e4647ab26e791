"""Where the replicas of one machine meet: a socket in a folder that only this user may enter.

The folder goes as soon as all are connected, so that nothing is left whatever ends them later.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

from stageline.inference.replicas.link import Link

LONGEST_PATH = 100  # of a socket, in bytes; Linux takes 107
SECONDS_TO_CONNECT = 60.0


class MeetingPlace:
    """A socket that listens; see `meeting_place`.

    Attributes:
        path: what the others connect to.
    """

    def __init__(self, listener: socket.socket, path: str) -> None:
        self.path = path
        self._listener = listener

    def wait_for(self, count: int, seconds: float) -> dict[int, Link]:
        """Links to `count` other replicas, by their numbers.

        Raises:
            ConnectionError: not all came in time, or one left at once.
        """
        until, found = time.monotonic() + seconds, {}
        while len(found) < count:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise ConnectionError(
                    f"connection timed out: {len(found)} of {count} other replicas came within "
                    f"{seconds:g} s"
                ) from error
            connection.settimeout(SECONDS_TO_CONNECT)
            link = Link(connection)
            hello = next(link.messages(), None)
            if hello is None:
                raise ConnectionError("connection closed: a replica left before it said its number")
            connection.settimeout(None)
            found[int(hello[0]["replica"])] = link
        return found


@contextlib.contextmanager
def meeting_place() -> Iterator[MeetingPlace]:
    """A place to meet, which is gone when the block ends."""
    folder = tempfile.mkdtemp(prefix="stageline_")  # 0700
    if len(os.fsencode(folder)) + 8 > LONGEST_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="stageline_", dir="/tmp")
    path = os.path.join(folder, "meet")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            yield MeetingPlace(listener, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def join_meeting(path: str, replica: int) -> Link:
    """Connects to the first replica.

    Raises:
        OSError: it is not there any more.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SECONDS_TO_CONNECT)
    connection.connect(path)
    connection.settimeout(None)
    link = Link(connection)
    link.send({"replica": replica})
    return link
