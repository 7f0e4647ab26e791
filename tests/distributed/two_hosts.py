"""Two machines on one: network namespaces with a cable between them. For tests; needs root."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MASTER_ADDR = "10.99.0.1"
SECONDS = 60


class TwoHosts:
    """Hosts "a" and "b", numbers 0 and 1; what runs on them is started by `start`."""

    def __init__(self) -> None:
        self.names = [f"stl{os.getpid()}{letter}" for letter in "ab"]
        self.started: list[subprocess.Popen] = []

    def build(self) -> None:
        """Raises CalledProcessError where that is not allowed."""
        a, b = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for number, name in enumerate(self.names, start=1):
            _ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
        self.mend()

    def mend(self) -> None:
        """Plugs the cable in."""
        for name in self.names:
            _ip("-n", name, "link", "set", "eth0", "up")

    def cut(self) -> None:
        """Pulls the cable: no side is told."""
        _ip("-n", self.names[1], "link", "set", "eth0", "down")

    def start(self, number: int, command: list[str], log: Path, **environment: str):
        """Runs a command on a host; its output goes to a file, as a pipe might fill."""
        letter = "ab"[number]
        own_name = ["unshare", "--uts", "bash", "-c", f'hostname {letter}; exec "$@"', "_"]
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], *own_name, *command],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def kill(self, number: int) -> None:
        """Ends everything on a host at once, as a power cut does, but for the cable."""
        for _ in range(20):
            pids = _ip("netns", "pids", self.names[number]).split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.05)

    def stop_all(self) -> None:
        """Ends what a test left."""
        for number in range(2):
            self.kill(number)
        for process in self.started:
            process.wait(SECONDS)
        self.started.clear()

    def remove(self) -> None:
        """Takes the hosts away, also when only some of them were made."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def enter(host: str, *, name: str) -> None:
    """Takes this process onto a host, as `TwoHosts.start` does with a command.

    Args:
        host: one of `TwoHosts.names`.
        name: what the machine is called there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", host).open() as place:
        entered = libc.setns(place.fileno(), CLONE_NEWNET), libc.unshare(CLONE_NEWUTS)
    assert entered == (0, 0), os.strerror(ctypes.get_errno())
    socket.sethostname(name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def why_not() -> str | None:
    """Return why hosts can't be made here; None if they can."""
    missing = [tool for tool in ("ip", "unshare", "bash") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (package iproute2 or util-linux)"
    hosts = TwoHosts()
    try:
        hosts.build()
        # a name of its own takes a right, too
        command = ["ip", "netns", "exec", hosts.names[0], "unshare", "--uts", "hostname", "a"]
        subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        return f"no right to make network namespaces: {error.stderr.strip()}"
    finally:
        hosts.remove()
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make the hosts, and remove them with all that runs on them."""
    hosts = TwoHosts()
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.stop_all()
        hosts.remove()


def torchrun(number: int, *, num_ranks: int = 1) -> list[str]:
    """Return the words between `python` and an entry file on one of the hosts."""
    return [
        *("-m", "torch.distributed.run", "--nnodes", "2"),
        *("--node-rank", str(number), "--nproc-per-node", str(num_ranks)),
        *("--rdzv-backend", "static", "--master-addr", MASTER_ADDR, "--master-port", "29500"),
    ]
