"""End a run. The rank that failed first reports; the others end quietly with its exit code.

A rank that fails writes an error file for the agent that has started it, before its sockets close.
When one rank dies, its neighbours lose their connections: they wait a moment, in which the agent
ends them. Nothing is cleaned up on this path: tearing a process group down would close sockets
before the cause is written.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from stageline.distributed import failure_record, stop
from stageline.errors import INTERRUPTED, HangError, UserError, spelled
from stageline.progress import Progress

SECONDS_FOR_THE_CAUSE = 2.0
_ending = threading.Lock()  # held by the thread that ends this process


def run_entry(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry file's `main` and end the process.

    Exit codes: what `main` returns (None is 0); an exception's `exit_code` (2 for a wrong option, 3
    for bad data; stageline/errors.py has all), printed without a traceback; 7 where memory is
    full; 130 and 143 after a signal that asks for a stop, once every rank has saved; 9 for
    anything else.
    """
    failure_record.begin()
    stop.install_stop_handler(end_stopped)
    try:
        code = main() or 0
    except KeyboardInterrupt:
        end_stopped(stop.words_before_the_first_step(), stop.stop_code() or INTERRUPTED)
    except Exception as error:
        trace = error.__traceback__
        # the frame of this file is left out
        end_failed(error.with_traceback(trace and trace.tb_next))
    code = code or stop.stop_code()
    stop.begin_to_end()  # the watchdog must not use an interpreter that ends
    if code:  # a failure is always recorded
        failure_record.leave_error_file(failure_record.record_here("", code, ""))
    failure_record.close_log()
    sys.exit(code)


def end_failed(error: BaseException) -> NoReturn:
    """End this process because of an exception."""
    if not failure_record.is_lost_connection(error):
        _end(failure_record.record_of(error))
    record = failure_record.record_of(error, is_secondary=True)
    who = f"rank {record.rank}" + (f" (stage {record.stage})" if record.stage is not None else "")
    message = (
        f"{who} lost a neighbour that told no cause here (the system may have ended it; the output "
        f"of another machine may say more): {record.message}"
    )
    _end(replace(record, message=message), patience=SECONDS_FOR_THE_CAUSE)


def end_stopped(message: str, code: int, *, kind: str = "") -> NoReturn:
    """End all ranks at once because of a signal, without waiting for a save."""
    _end(failure_record.record_here(kind, code, message))


def end_hung(message: str, *, where: Progress) -> NoReturn:
    """End all ranks because this one makes no progress since `where`."""
    _end(failure_record.record_here(HangError.kind, HangError.exit_code, message, at=where))


def tell(record: failure_record.FailureRecord) -> None:
    """Print a report, and write failure.json."""
    failure_record.write_first(record)
    if record.message:
        sys.stdout.flush()
        line = "\n" if sys.stderr.isatty() else ""  # below a bar of progress
        print(line + record.report(), end="", file=sys.stderr, flush=True)
    if record.code != UserError.exit_code and failure_record.has_checkpoint():
        print(spelled("next: the same command with `resume` auto"), flush=True)


def _end(record: failure_record.FailureRecord, *, patience: float = 0.0) -> NoReturn:
    """End the process at once, or after `patience` seconds in which an agent may end it."""
    stop.begin_to_end()
    with contextlib.suppress(ValueError):  # not in another thread
        # torchrun ends the ranks as soon as one is gone: first the report
        signal.signal(signal.SIGTERM, signal.SIG_DFL if patience else signal.SIG_IGN)
    time.sleep(patience)
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # until the other thread has ended the process
    record = failure_record.keep_traceback(record)
    failure_record.leave_error_file(record)
    if failure_record.is_first_to_report():
        tell(record)
    stop.end_helpers()
    failure_record.close_log()
    sys.stdout.flush()
    os._exit(record.code)
