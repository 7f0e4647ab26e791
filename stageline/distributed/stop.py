"""Signals that ask for a stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, the early one of Slurm.

The first asks the run to save after the current step; a second one, which is not the early one,
ends it at once. SIGHUP of a closed terminal counts as SIGTERM.
Python runs handlers between bytecodes, and none runs while the main thread waits inside gloo. So
the system's part of a handler writes a byte into a socket, and a thread of its own reads it.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from stageline.errors import INTERRUPTED, PREEMPTED

PR_SET_PDEATHSIG = 1


def end_helpers() -> None:
    """Kill the data workers of this process; they may hang, and would outlive it."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(Exception):
            child.kill()


def die_with_parent() -> None:
    """Let the system kill this process as soon as its parent ends, also if it hangs."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGHUP: PREEMPTED,  # a terminal was closed
}
# a terminal and a launcher may both pass on one key press, Slurm and torchrun one signal
MIN_SECONDS_BETWEEN = 1.0
# before the first step the main thread is interrupted, unless it is inside a library
SECONDS_TO_UNWIND = 2.0
Leave = Callable[[str, int], object]


@dataclass
class _Stop:
    """State of the request to stop.

    Attributes:
        is_read: the run reads the flag after each step.
        signum, asked_at: the first signal, of this rank or another, and the time of its receipt.
        times: for the early signal (True) and all others (False): time and name of the first.
        is_raised: the main thread was interrupted, or must not be.
        code: the exit code that all ranks have agreed on.
    """

    is_read: bool = False
    signum: int | None = None
    asked_at: float = 0.0
    times: dict[bool, tuple[float, str]] = field(default_factory=dict)
    is_raised: bool = False
    code: int | None = None


@dataclass(frozen=True)
class StopWords:
    """Messages about a stop; by default those of a training run.

    Attributes:
        first, again: effect of the first signal, and of a second one of its kind.
        early: message of a stop before there was anything to save.
        at_once: message after a second signal.
    """

    first: str = "Stopping after this step"
    again: str = "ends at once without saving"
    early: str = "before the first step; nothing was saved"
    at_once: str = ", without saving; what was saved before is kept"


_words = StopWords()
_stop = _Stop()
_ending = threading.Event()
_installed_by: int | None = None


def install_stop_handler(leave: Leave) -> None:
    """Make signals set the flag that `stop_requested()` reads.

    Args:
        leave: ends the process, with a report and an exit code; called from another thread.
    """
    global _stop, _installed_by
    _stop = _Stop()
    _ending.clear()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for signum in CODES:
        # below nohup a closed terminal is to change nothing
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _interrupt_the_start)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(receiver, leave), daemon=True).start()
    if _installed_by is None:
        os.register_at_fork(after_in_child=_forget_in_child)
    _installed_by = os.getpid()


def speak_of_stops(words: StopWords) -> None:
    """Set the messages about stops in this process, in place of those of a training run."""
    global _words
    _words = words


def release_signals() -> None:
    """Remove the handlers: for a process that turns out to be a launcher."""
    _ending.set()
    signal.set_wakeup_fd(-1)


def stop_requested() -> bool:
    """Whether a clean stop was asked for. Until it is first called, a signal ends the run."""
    _stop.is_read = True
    return _stop.signum is not None


def asked() -> tuple[int, float] | None:
    """Return the signal that asked for a stop, and its time; this promises no clean stop."""
    return None if _stop.signum is None else (_stop.signum, _stop.asked_at)


def ask(signum: int) -> None:
    """Set the flag, if it is not set; rank 0 prints that."""
    if _stop.signum is not None:
        return
    _stop.asked_at = time.monotonic()
    _stop.signum = signum
    if _stop.is_read and os.environ.get("RANK", "0") == "0":
        again = (
            "Ctrl-C again" if signum == signal.SIGINT else f"a second {signal.Signals(signum).name}"
        )
        words = f"\n{_words.first}; {again} {_words.again}.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


def stop_code() -> int:
    """The exit code that follows from what was asked for; 0 if nothing was."""
    if _stop.code is not None:
        return _stop.code
    return 0 if _stop.signum is None else CODES[signal.Signals(_stop.signum)]


def begin_to_end(code: int | None = None) -> None:
    """Ignore signals from here on: this process ends, with the `code` that all ranks agreed on."""
    _stop.code = _stop.code if code is None else code
    _ending.set()


def is_ending() -> bool:
    """Whether signals are passed over, as the process is about to end."""
    return _ending.is_set()


def _interrupt_the_start(signum: int, frame: FrameType | None) -> None:
    """Run in the main thread, as soon as Python code does."""
    if not (_stop.is_read or _stop.is_raised or _ending.is_set()):
        _stop.is_raised = True
        ask(signum)
        raise KeyboardInterrupt


def _listen(receiver: socket.socket, leave: Leave) -> None:
    while True:
        for number in receiver.recv(64):
            if number in CODES and not _ending.is_set():
                _heed(signal.Signals(number), leave)


def _heed(signum: signal.Signals, leave: Leave) -> None:
    now = time.monotonic()
    # SIGUSR1 is an early warning, behind which Slurm sends SIGTERM; all others are of one kind
    first, name = _stop.times.setdefault(signum == signal.SIGUSR1, (now, signum.name))
    if not _stop.is_read:
        ask(signum)
        time.sleep(SECONDS_TO_UNWIND)
        if not _stop.is_read and not _ending.is_set():
            leave(words_before_the_first_step(), CODES[signum])
    elif first == now:
        ask(signum)
    elif now - first >= MIN_SECONDS_BETWEEN:
        leave(f"Ended at once by a second {name}{_words.at_once}.", stop_code())


def words_before_the_first_step() -> str:
    """Return the message of a run that was stopped while it started."""
    how = "Interrupted"
    if _stop.signum not in (None, signal.SIGINT):
        how = f"Stopped by {signal.Signals(_stop.signum).name}"
    return f"{how} {_words.early}."


def _forget_in_child() -> None:
    """A forked helper, one that loads data, would write its signals into our socket."""
    if _installed_by != os.getppid():
        return
    die_with_parent()
    with contextlib.suppress(ValueError):  # forked by another thread than the main one
        signal.set_wakeup_fd(-1)
        # a terminal and Slurm signal helpers too; the main process decides when they end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
