"""The processes of the other ranks of this machine: whether they live, and ending those that stay.

torchrun gives a process that cannot leave, because it was stopped or hangs in C, 30 seconds. The
rank that reports a failure is quicker.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stageline.distributed.stacks import fetch_stacks
from stageline.distributed.worker_notes import WORKERS_FOLDER
from stageline.errors import PREEMPTED

SECONDS_TO_LEAVE = 3.0
SECONDS_BETWEEN_LOOKS = 0.05
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """A process, and what tells it from a later one with the same number.

    Attributes:
        started: clock ticks since the machine's start; 0 where the system does not say.
        stacks_fd: where it writes the stacks of its threads when asked to; -1: nowhere.
    """

    rank: int
    pid: int
    started: int = 0
    stacks_fd: int = -1

    def is_alive(self) -> bool:
        """Whether it runs or is stopped; what has ended and waits to be fetched is not alive."""
        state, started = _state(self.pid)
        return state not in ("", "Z", "X") and started == self.started


_known: dict[int, Process] = {}


def this_process(*, stacks_fd: int = -1) -> Process:
    """This rank's own."""
    pid = os.getpid()
    return Process(int(os.environ.get("RANK", "0")), pid, _state(pid)[1], stacks_fd)


def remember(processes: Iterable[Process]) -> None:
    """Notes processes of other ranks of this machine."""
    _known.update({process.rank: process for process in processes})


def forget_all() -> None:
    """For a process that was forked."""
    _known.clear()


def has_lost_one() -> bool:
    """Whether another rank of this machine has ended: then a SIGTERM is the launcher's."""
    if not all(process.is_alive() for process in _known.values()):
        return True
    # one that ended before its first beat is known by the launcher's notes alone
    folder = os.environ.get(WORKERS_FOLDER)
    files = Path(folder).glob("*.pid") if folder else ()
    return any(_state(int(file.read_text()))[0] in ("", "Z", "X") for file in files)


def end_the_rest(*, seconds: float = SECONDS_TO_LEAVE) -> list[int]:
    """Waits until the other ranks of this machine have ended; kills those that do not.

    Returns:
        The ranks that were killed.
    """
    deadline = time.monotonic() + seconds
    left = [process for process in _known.values() if process.is_alive()]
    while left and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        left = [process for process in left if process.is_alive()]
    fetch_stacks({process.rank: (process.pid, process.stacks_fd) for process in left})
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    return [process.rank for process in left]


def end_helpers() -> None:
    """Kills what this process has started to load data; it may hang, and would outlive us."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.kill()


def die_with_parent() -> None:
    """Lets the system kill this process as soon as its parent ends, also if it hangs."""
    with contextlib.suppress(Exception):  # Linux only; others are left to what looks at getppid
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_by_sigterm() -> NoReturn:
    """Ends this process as SIGTERM does where nobody handles it; from any thread."""
    with contextlib.suppress(Exception):  # Python sets handlers from its main thread only
        ctypes.CDLL(None).signal(signal.SIGTERM, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
    os._exit(PREEMPTED)


def _state(pid: int) -> tuple[str, int]:
    """(letter of the state, time of start); ("", 0) if there is no such process."""
    try:
        # the name in brackets may hold blanks
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return "", 0
    try:
        os.kill(pid, 0)
    except OSError:
        return "", 0
    return "?", 0
