"""How a run ends. The rank that failed first reports; the others end quietly with its exit code.

When one rank dies, its neighbours lose their connections and would report that instead of the
cause. So a rank writes down what happened, then claims the report on a board that all ranks share
(board.py), before its sockets close; one that merely lost a connection waits a moment for a better
claim. Of several claims the earliest is told. On each other machine one rank repeats the first
line. Nothing is cleaned up on this path: tearing a process group down would close sockets before
the cause is told.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NoReturn

from stageline.distributed import stop
from stageline.distributed.board import Board, claim_report
from stageline.distributed.failure_record import (
    FailureRecord,
    close_log,
    first_of,
    is_lost_connection,
    read_first,
    read_record,
    record_here,
    record_of,
    stages_here,
    write_first,
    write_record,
)
from stageline.distributed.machines import Machine, leave, this_machine
from stageline.distributed.stop import (
    end_helpers,
    end_the_rest,
    has_launcher,
    note,
    write_stacks,
)
from stageline.errors import CRASH, INTERRUPTED, PREEMPTED, HangError
from stageline.progress import Progress

SECONDS_FOR_THE_CAUSE = 2.0
SECONDS_FOR_THE_WATCH = 5.0
SECONDS_FOR_THE_REPORT = 5.0
SECONDS_FOR_AN_EARLIER_ONE = 0.2
SECONDS_TO_BE_HEARD = 3.0
SECONDS_FOR_A_LINE = 0.5
SECONDS_FOR_THE_OTHERS = 2.0
TOLD, ENDED, STAGES = "told", "ended", "stages"  # notes for our launcher


# a thread of this process tells a cause; the watches in other threads leave it to that one
_has_cause = threading.Event()


def name_stages(stages: Sequence[int]) -> None:
    """Tells which stages of the model this rank runs, for its report."""
    stages_here[:] = stages
    note(STAGES, list(stages))


def run_entry(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry file's `main` and ends the process.

    Exit codes: what `main` returns (None is 0); an exception's `exit_code` (2 for a wrong option, 3
    for bad data; stageline/errors.py has all), printed without a traceback; 7 where memory is
    full; 130 and 143 after a signal that asks for a stop, once every rank has saved; 9 for
    anything else.
    """
    stop.install_stop_handler(end_stopped)
    try:
        code = main() or 0
    except KeyboardInterrupt:
        end_stopped(stop.words_before_the_first_step(), stop.stop_code() or INTERRUPTED)
    except Exception as error:
        trace = error.__traceback__
        end_failed(error.with_traceback(trace and trace.tb_next))  # less the frame of this file
    code = code or stop.stop_code()
    note(ENDED, code)
    close_log()
    if code in (0, INTERRUPTED, PREEMPTED):
        leave()
    sys.exit(code)


def end_failed(error: BaseException) -> NoReturn:
    """Ends this process because of an exception."""
    if not is_lost_connection(error):
        _end(record_of(error))
    record = record_of(error, is_secondary=True)
    # the watch over several machines tells better who was lost
    patience = SECONDS_FOR_THE_WATCH if this_machine().count > 1 else SECONDS_FOR_THE_CAUSE
    who = f"rank {record.rank}" + (f" (stage {record.stage})" if record.stage is not None else "")
    message = (
        f"{who} lost a neighbour that told no cause (the system may have ended it): "
        f"{record.message}"
    )
    _end(replace(record, message=message), patience=patience)


def end_stopped(message: str, code: int, *, kind: str = "") -> NoReturn:
    """Ends all ranks at once because of a signal, without waiting for a save."""
    _end(record_here(kind, code, message))


def end_hung(message: str, *, rank: int, stages: tuple[int, ...], where: Progress) -> NoReturn:
    """Ends all ranks because `rank`, which runs `stages`, makes no progress since `where`."""
    blamed = replace(
        record_here(HangError.kind, HangError.exit_code, message),
        rank=rank,
        stages=stages,
        stage=where.stage,
        step=where.step,
        micro_batch=where.micro_batch,
        operation=where.operation,
    )
    _end(blamed)


def end_lost(what: Machine | str, why: str) -> NoReturn:
    """Ends this process because another machine is gone, unless a rank there told the cause."""
    message = (
        f"lost contact with {what}: {why}. Its own output may say more; else it was switched off, "
        "killed, or cut off the network."
    )
    if _has_cause.is_set():
        _wait_for_the_end()
    lost = what.index if isinstance(what, Machine) else 0
    record = record_here("crash", CRASH, message, is_secondary=True)
    _end(record, patience=SECONDS_FOR_THE_CAUSE, lost=lost)


def end_as_told() -> NoReturn:
    """Ends this process because a rank has claimed the report."""
    if not _has_cause.is_set():
        message = "ended because another rank had failed."
        _end(record_here("crash", CRASH, message, is_secondary=True))
    _wait_for_the_end()


def _end(record: FailureRecord, *, patience: float = 0.0, lost: int | None = None) -> NoReturn:
    """Reports unless another rank has the claim, then ends the process at once."""
    stop.hold_main_thread()
    if not has_launcher():  # torchrun ends the ranks as soon as one is gone: first the report
        with contextlib.suppress(ValueError):  # not in another thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not record.is_secondary:
        _has_cause.set()
    note(ENDED, record.code)
    record = write_record(record)
    board, winner = claim_report(asdict(record), patience=patience, is_store_lost=lost == 0)
    stop.begin_to_end()  # not before: while it waits for a cause, a launcher may know one
    first, sees_to_the_rest = record, winner is None
    with contextlib.suppress(Exception):  # the store may end with its machine at any time
        if board is None:
            first = _tell(record)
        elif winner is None:
            first = _tell(_earliest(board, record))
            board.wait_heard(SECONDS_TO_BE_HEARD, but=lost)
            board.mark_reported()
            board.leave(SECONDS_FOR_THE_OTHERS)
        else:
            first = read_record(winner)  # where the store ends while the next line waits
            if first.code == HangError.exit_code:  # also one that merely lost a neighbour
                write_stacks()
            first = read_record(board.settled(SECONDS_FOR_THE_REPORT) or winner)
            is_near = winner["machine"] == record.machine
            sees_to_the_rest = _listen(board, first, is_near=is_near)
            board.leave(SECONDS_FOR_THE_OTHERS)
    if sees_to_the_rest:
        end_the_rest()
    end_helpers()
    close_log()
    sys.stdout.flush()
    os._exit(first.code)


def _wait_for_the_end() -> NoReturn:
    while True:
        time.sleep(SECONDS_FOR_THE_REPORT)


def _earliest(board: Board, mine: FailureRecord) -> FailureRecord:
    """The earliest failure of those that were claimed; the other ranks are told, too."""
    first = mine
    with contextlib.suppress(Exception):
        time.sleep(SECONDS_FOR_AN_EARLIER_ONE)
        first = first_of([mine, *map(read_record, board.claims())])
        board.settle(asdict(first))
    return first


def _tell(first: FailureRecord) -> FailureRecord:
    """Reports, unless a cause was told before; what was told."""
    told = read_first()
    if first.is_secondary and told is not None and not told.is_secondary:
        return told  # by a rank whose store ended with it
    note(TOLD, asdict(first))
    # a launcher that is ours knows better how the neighbour ended
    if not (first.is_secondary and has_launcher()):
        write_first(first)
        _print(first.report())
    return first


def _listen(board: Board, first: FailureRecord, *, is_near: bool) -> bool:
    """Waits for the rank that has the claim; repeats its line on another machine.

    Returns:
        Whether this rank sees to the end of the others of its machine.
    """
    if is_near:
        # an agent ends all ranks as soon as one is gone
        board.wait_reported(SECONDS_FOR_THE_REPORT)
    elif board.is_first_to_hear():
        _print(f"{first.headline} [told by rank {first.rank} on {first.host}]\n")
        return True
    else:
        time.sleep(SECONDS_FOR_A_LINE)
    return False


def _print(report: str) -> None:
    sys.stdout.flush()
    print(("\n" if sys.stderr.isatty() else "") + report, end="", file=sys.stderr, flush=True)
