"""Faults on demand, for tests: a no-op unless the environment asks for one.

STAGELINE_CHAOS="at=forward,rank=1,step=3,do=sigkill" lets rank 1 kill itself when it comes to the
point `forward` with 3 optimizer steps done. Keys: `at` (a point's name), `do` (see ACTIONS), and
optionally `rank`, `step`, `count` (the how-manieth time that all else fits; default 1), `restart`
(torchrun's restart count; default any), `value` (of `exit`, `sleep` and `limit_files`). Several
faults are divided by ";".
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stageline.progress import place

VARIABLE = "STAGELINE_CHAOS"


class InjectedError(RuntimeError):
    """The error of the action `raise`."""


def _raise(value: int) -> None:
    raise InjectedError("a fault was asked for")


def _raise_no_space(value: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _raise_no_memory(value: int) -> None:
    import torch

    raise torch.OutOfMemoryError("out of memory (a fault was asked for)")


def _limit_files(value: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (value, value))


def _hold_gil(value: int) -> None:
    import ctypes

    mutex = ctypes.create_string_buffer(128)  # of zeros: it is free
    for _ in range(2):  # the second time waits for ever, in C
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


ACTIONS: dict[str, Callable[[int], None]] = {
    "raise": _raise,
    "enospc": _raise_no_space,
    "oom": _raise_no_memory,
    "exit": lambda value: os._exit(value),
    "sys_exit": lambda value: (_ for _ in ()).throw(SystemExit(value)),
    "sigkill": lambda value: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda value: os.kill(os.getpid(), signal.SIGSEGV),
    "sigstop": lambda value: os.kill(os.getpid(), signal.SIGSTOP),
    "sigterm": lambda value: os.kill(os.getpid(), signal.SIGTERM),
    "sigusr1": lambda value: os.kill(os.getpid(), signal.SIGUSR1),
    "sigint": lambda value: os.kill(os.getpid(), signal.SIGINT),
    "hang": lambda value: time.sleep(3600),
    "hold_gil": _hold_gil,
    "sleep": time.sleep,
    "limit_files": _limit_files,
}


@dataclass
class _Fault:
    at: str
    do: str
    rank: int | None = None
    step: int | None = None
    restart: int | None = None
    count: int = 1
    value: int = 137

    def fits(self, name: str) -> bool:
        environment = os.environ
        return (
            self.at == name
            and (self.rank is None or self.rank == int(environment.get("RANK", "0")))
            and (self.step is None or self.step == place().step)
            and (
                self.restart is None
                or self.restart == int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
            )
        )


def _read(text: str) -> list[_Fault]:
    faults = []
    for part in filter(None, text.split(";")):
        given = dict(item.split("=", 1) for item in part.split(","))
        names: dict[str, Any] = {k: v if k in ("at", "do") else int(v) for k, v in given.items()}
        faults.append(_Fault(**names))
    return faults


_faults = _read(os.environ.get(VARIABLE, ""))


def arm() -> None:
    """Reads the environment anew: for a process that was forked after this file was imported."""
    _faults[:] = _read(os.environ.get(VARIABLE, ""))


def point(name: str) -> bool:
    """A place where a fault may be asked for.

    Returns:
        Whether the fault `value` was asked for here: one that the caller makes, a nan for example.
    """
    if not _faults:
        return False
    for fault in _faults:
        if fault.fits(name):
            fault.count -= 1
            if fault.count == 0:
                if fault.do not in ACTIONS:
                    return fault.do == "value"
                ACTIONS[fault.do](fault.value)
    return False
