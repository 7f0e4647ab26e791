"""Signals that ask for a stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, the early one of Slurm.

The first asks the run to save after the step that goes on; a second of its kind ends it at once.
Python runs handlers between bytecodes, and none runs while the main thread waits inside gloo. So
the system's part of a handler writes a byte into a socket, and a thread of its own reads it.
"""

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from stageline.errors import INTERRUPTED, PREEMPTED

# The stacks of all threads, for the report of a hang. A rank writes its own. One whose Python does
# not run any more is asked by SIGUSR2: the system's part of the handler writes into a file in
# memory, which a neighbour on the same machine reads.

FOLDER = "failures"  # beside the other accounts of a failure
SECONDS_TO_WRITE = 3.0  # at most; the machine may be busy
_run_folder: Path | None = None
_has_written = False


def keep_stacks_in(folder: Path | None) -> None:
    """Tells where stacks are written, below the run's folder; None: nowhere."""
    global _run_folder, _has_written
    _run_folder, _has_written = folder, False
    if folder is not None:  # of an earlier run in this folder
        with contextlib.suppress(OSError):
            _file(folder, _own_rank()).unlink(missing_ok=True)


def offer_stacks() -> int:
    """Makes SIGUSR2 write the stacks of this process into a file in memory; its descriptor."""
    number = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR2, file=number, all_threads=True)
    return number


def write_stacks() -> Path | None:
    """Writes the stacks of this process, once; the folder, if that was possible."""
    global _has_written
    if _run_folder is None:
        return None
    path = _file(_run_folder, _own_rank())
    if not _has_written:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:  # a run that ends must not fail of it
            return None
        _has_written = True
    return path.parent


def fetch_stacks(offers: Mapping[int, tuple[int, int]]) -> None:
    """Writes the stacks of other processes of this machine, unless they did so themselves.

    Args:
        offers: rank -> (process id, number that `offer_stacks` gave there).
    """
    if _run_folder is None:
        return
    offers = {rank: offer for rank, offer in offers.items() if offer[1] >= 0}
    for pid, _ in offers.values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + SECONDS_TO_WRITE
    for rank, (pid, number) in offers.items():
        with contextlib.suppress(OSError):
            text = _settled(pid, number, deadline)
            file = _file(_run_folder, rank)
            if text and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)


def _settled(pid: int, number: int, deadline: float) -> bytes:
    """What a process has written into its file in memory, once it writes no more."""
    # by its name in /proc, so that our own place in the file is at its beginning
    file = Path(f"/proc/{pid}/fd/{number}")
    text, before = b"", None
    while (not text or text != before) and time.monotonic() < deadline:
        time.sleep(0.1)
        text, before = file.read_bytes(), text
    return text


def _file(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank}.stacks"


def _own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


# where workers leave notes for our launcher: process ids, stages, how they end
WORKERS_FOLDER = "STAGELINE_WORKERS_FOLDER"


def has_launcher() -> bool:
    """Whether our launcher started this process."""
    return WORKERS_FOLDER in os.environ


def note(name: str, value: Any) -> None:
    """Leaves `value` as `<rank>.<name>`; a failing process must not fail over it."""
    if has_launcher():
        with contextlib.suppress(OSError):
            path = Path(os.environ[WORKERS_FOLDER], f"{os.environ.get('RANK', '0')}.{name}")
            draft = path.with_suffix(f".{name}_draft_{os.getpid()}")
            draft.write_text(json.dumps(value))
            draft.replace(path)


def read_notes(folder: Path, name: str) -> dict[int, Any]:
    """Rank -> what it left by that name."""
    return {
        int(path.name.partition(".")[0]): json.loads(path.read_text())
        for path in sorted(folder.glob(f"*.{name}"))
    }


SECONDS_TO_LEAVE = 3.0
SECONDS_BETWEEN_LOOKS = 0.05
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """A process, and what tells it from a later one with the same number.

    Attributes:
        started: clock ticks since the machine's start.
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

    torchrun gives a process that was stopped, or hangs in C, 30 seconds.

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
    with contextlib.suppress(Exception):
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
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: PREEMPTED, signal.SIGUSR1: PREEMPTED}
# a terminal and a launcher may both pass on one key press, Slurm and torchrun one signal
MIN_SECONDS_BETWEEN = 1.0
# before the first step the main thread is interrupted, unless it is inside a library
SECONDS_TO_UNWIND = 2.0
Leave = Callable[[str, int], object]


@dataclass
class _Stop:
    """What was asked for.

    Attributes:
        is_read: somebody looks at the flag after each step.
        signum, asked_at: the first signal, of this rank or another, and when it was heard of.
        times: when each signal first came to this process.
        is_raised: the main thread was interrupted, or is not to be.
        code: the exit code that all ranks have agreed on.
    """

    is_read: bool = False
    signum: int | None = None
    asked_at: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    is_raised: bool = False
    code: int | None = None


@dataclass(frozen=True)
class StopWords:
    """What a person is told who asks for a stop; by default of a training run.

    Attributes:
        first, again: what the first signal does, and a second one of its kind.
        early: of a stop before there was anything to save.
        at_once: after a second signal.
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
    """Makes signals set the flag that `stop_requested()` reads.

    Args:
        leave: ends the process, with a report and an exit code; called from another thread.
    """
    global _stop, _installed_by
    _stop = _Stop()
    _ending.clear()
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    for signum in CODES:
        signal.signal(signum, _interrupt_the_start)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(receiver, leave), daemon=True).start()
    if _installed_by is None:
        os.register_at_fork(after_in_child=_forget_in_child)
    _installed_by = os.getpid()


def speak_of_stops(words: StopWords) -> None:
    """Has this process tell of stops in other words than a training run's."""
    global _words
    _words = words


def release_signals() -> None:
    """Takes the handlers away: for a process that turns out to be a launcher."""
    _ending.set()
    signal.set_wakeup_fd(-1)


def stop_requested() -> bool:
    """Whether a clean stop was asked for. Until it is first called, a signal ends the run."""
    _stop.is_read = True
    return _stop.signum is not None


def asked() -> tuple[int, float] | None:
    """The signal that asked for a stop, and when; unlike `stop_requested()` it promises nothing."""
    return None if _stop.signum is None else (_stop.signum, _stop.asked_at)


def ask(signum: int) -> None:
    """Sets the flag, if it is not set; rank 0 says so."""
    if _stop.signum is not None:
        return
    _stop.asked_at = time.monotonic()
    _stop.signum = signum
    if _stop.is_read and os.environ.get("RANK", "0") == "0":
        again = "Ctrl-C again" if signum == signal.SIGINT else f"a second {name_of(signum)}"
        words = f"\n{_words.first}; {again} {_words.again}.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


def stop_code() -> int:
    """The exit code that follows from what was asked for; 0 if nothing was."""
    if _stop.code is not None:
        return _stop.code
    return 0 if _stop.signum is None else CODES[signal.Signals(_stop.signum)]


def settle(code: int) -> None:
    """Notes what the ranks have agreed on at the end: from here on signals are passed over."""
    _stop.code = code
    _ending.set()


def hold_main_thread() -> None:
    """No signal interrupts the main thread from here on: it is about to report."""
    _stop.is_raised = True


def begin_to_end() -> None:
    """Signals are passed over from here on: this process reports, and ends."""
    _ending.set()


def is_ending() -> bool:
    """Whether signals are passed over, as the process is about to end."""
    return _ending.is_set()


def name_of(signum: int) -> str:
    """`SIGTERM`."""
    return signal.Signals(signum).name


def _interrupt_the_start(signum: int, frame: FrameType | None) -> None:
    """Runs in the main thread, as soon as Python code does."""
    if signum == signal.SIGTERM and not _ending.is_set() and has_lost_one():
        die_by_sigterm()  # as in `_heed`, which may come second
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
    if signum == signal.SIGTERM and has_lost_one():
        die_by_sigterm()  # a launcher ends the ranks that are left; it knows the cause
    now = time.monotonic()
    first = _stop.times.setdefault(signum, now)
    if not _stop.is_read:
        ask(signum)
        time.sleep(SECONDS_TO_UNWIND)
        if not _stop.is_read and not _ending.is_set():
            leave(words_before_the_first_step(), CODES[signum])
    elif first == now:
        ask(signum)
    elif now - first >= MIN_SECONDS_BETWEEN:
        leave(f"Ended at once by a second {signum.name}{_words.at_once}.", CODES[signum])


def words_before_the_first_step() -> str:
    """What a run says that was stopped while it started."""
    how = "Interrupted"
    if _stop.signum not in (None, signal.SIGINT):
        how = f"Stopped by {name_of(_stop.signum)}"
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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
