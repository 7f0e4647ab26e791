"""The machines of a run: which one this process runs on, and a connection that tells of a lost one.

Over the TCP connection from each machine to the first one nothing travels. It ends when a machine's
processes end; and when the machine, or the network, goes without a word, the kernels notice: they
ask each other for a sign of life. A process that computes for hours or was stopped in a debugger
keeps its connection, because its kernel answers. Knows neither torch nor what is to be done about a
lost machine.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """One machine of a run, its number of `count`; torchrun says "node" or "group"."""

    index: int
    count: int
    host: str
    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        """`ranks 4-7 (host b)`."""
        last = self.first_rank + self.num_ranks - 1
        ranks = f"ranks {self.first_rank}-{last}" if self.num_ranks > 1 else f"rank {last}"
        return f"{ranks} (host {self.host})"


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """The machine of this process; the only one where no torchrun says otherwise."""
    rank = int(environment.get("RANK", "0"))
    return Machine(
        index=int(environment.get("GROUP_RANK", "0")),
        count=int(environment.get("GROUP_WORLD_SIZE", "1")),
        host=socket.gethostname(),
        first_rank=rank - int(environment.get("LOCAL_RANK", rank)),
        num_ranks=int(environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1"))),
    )


def process_started_at() -> float:
    """When this process began, on the clock of `time.time`."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


BYE = b"bye\n"
SECONDS_FOR_HELLO = 10.0
PROBES = 5
OnLost = Callable[[Machine, str], None]

_leaving = threading.Event()
_tied = threading.Event()  # set where there is nothing to tie, too
_tied.set()
_connections: list[socket.socket] = []


def leave() -> None:
    """Tells the other machines that this process ends as it should."""
    _leaving.set()
    for connection in list(_connections):
        with contextlib.suppress(OSError):
            connection.sendall(BYE)


def is_leaving() -> bool:
    """Whether this process is about to end as it should."""
    return _leaving.is_set()


def expect_tie() -> None:
    """Tells that `mark_tied` will follow."""
    _tied.clear()


def mark_tied() -> None:
    """Tells that this machine watches over the others, as far as it can."""
    _tied.set()


def wait_tied(seconds: float) -> None:
    """Waits for `mark_tied`: a machine that is lost before would be missed."""
    _tied.wait(seconds)


def open_hub(machine: Machine, *, lost_after: float, on_lost: OnLost) -> str:
    """Listens on the first machine, in threads; gives an invitation for the other machines.

    Args:
        lost_after: seconds without a sign of life after which a machine is lost; 0: for ever.
        on_lost: called with the machine and how it was lost.
    """
    server = _listen()
    token = uuid.uuid4().hex
    invitation = {"port": server.getsockname()[1], "token": token, "machine": asdict(machine)}

    def greet(connection: socket.socket) -> None:
        other = _read_hello(connection, token)
        if other is None:
            connection.close()  # a stranger
        else:
            _watch(connection, other, lost_after, on_lost)

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            _in_thread(greet, connection)

    _in_thread(accept)
    return json.dumps(invitation)


def reach_hub(
    machine: Machine, address: str, invitation: str, *, lost_after: float, on_lost: OnLost
) -> None:
    """Connects another machine to the first one, and watches over it in a thread.

    Raises:
        OSError: there is no way to that port.
    """
    told = json.loads(invitation)
    connection = socket.create_connection((address, told["port"]), timeout=SECONDS_FOR_HELLO)
    hello = {"token": told["token"], "machine": asdict(machine)}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    _in_thread(_watch, connection, Machine(**told["machine"]), lost_after, on_lost)


def _in_thread(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # built in, but switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _read_hello(connection: socket.socket, token: str) -> Machine | None:
    connection.settimeout(SECONDS_FOR_HELLO)
    try:
        with connection.makefile("rb", buffering=0) as file:  # a goodbye may follow at once
            hello = json.loads(file.readline(4096))
        return Machine(**hello["machine"]) if hello["token"] == token else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _watch(connection: socket.socket, other: Machine, lost_after: float, on_lost: OnLost) -> None:
    """Returns when the other machine or this one has said goodbye."""
    connection.settimeout(None)
    _ask_for_signs_of_life(connection, lost_after)
    _connections.append(connection)
    try:
        said = connection.recv(len(BYE))
        why = "its connection was closed"
    except TimeoutError:
        said, why = b"", f"no sign of life for {lost_after:g} s"
    except OSError as error:
        said, why = b"", f"its connection broke ({error.strerror})"
    if not said and not is_leaving():
        on_lost(other, why)


def _ask_for_signs_of_life(connection: socket.socket, seconds: float) -> None:
    """Lets the kernel give up after `seconds` of silence."""
    if seconds <= 0:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, round(seconds / (PROBES + 1)))
    wanted = {
        socket.TCP_KEEPIDLE: pause,
        socket.TCP_KEEPINTVL: pause,
        socket.TCP_KEEPCNT: PROBES,
        socket.TCP_USER_TIMEOUT: int(seconds * 1000),
    }
    for option, value in wanted.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
