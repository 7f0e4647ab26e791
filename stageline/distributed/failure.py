"""How a run ends. The rank that failed first reports; the others end quietly with its exit code.

When one rank dies, its neighbours lose their connections and would report that instead of the
cause. So a rank claims the report on a board that all ranks share (board.py), before its sockets
close; one that merely lost a connection waits a moment for a better claim. On each other machine
one rank repeats the first line. Nothing is cleaned up on this path: tearing a process group down
would close sockets before the cause is told.
"""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from stageline.distributed import stop
from stageline.distributed.board import claim_report
from stageline.distributed.lifeline import leave
from stageline.distributed.machines import Machine, this_machine
from stageline.distributed.neighbours import end_helpers, end_the_rest
from stageline.errors import INTERRUPTED, PREEMPTED, HangError
from stageline.progress import Place, place

UNEXPECTED = 1
SECONDS_FOR_THE_CAUSE = 2.0
SECONDS_FOR_THE_WATCH = 5.0
SECONDS_FOR_THE_REPORT = 5.0
SECONDS_TO_BE_HEARD = 3.0
SECONDS_FOR_A_LINE = 0.5
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|"
    r"timed out|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_stages: list[int] = []


def name_stages(stages: Sequence[int]) -> None:
    """Tells which stages of the model this rank runs, for its report."""
    _stages[:] = stages


def run_entry(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry file's `main` and ends the process.

    Exit codes: what `main` returns (None is 0); an exception's `exit_code` (2 for a wrong option, 3
    for bad data), printed without a traceback; 130 and 143 after a signal that asks for a stop,
    once every rank has saved; 1 for anything else.
    """
    stop.install_stop_handler(end_stopped)
    try:
        code = main() or 0
    except KeyboardInterrupt:
        _end_interrupted()
    except Exception as error:
        trace = error.__traceback__
        _end_failed(error.with_traceback(trace and trace.tb_next))  # less the frame of this file
    code = code or stop.stop_code()
    if code in (0, INTERRUPTED, PREEMPTED):
        leave()
    sys.exit(code)


def describe_failure(error: BaseException) -> tuple[str, int]:
    """The report of an exception and the exit code that follows from it."""
    for cause in _causes(error):
        code = getattr(cause, "exit_code", None)
        if isinstance(code, int):
            return f"error: {cause}\n", code
    root = list(_causes(error))[-1] if str(error).lstrip().startswith("[Stage") else error
    what = "".join(traceback.format_exception_only(root)).strip()
    trace = "".join(traceback.format_exception(error))
    return f"{_who()}: {what}\n{trace}", UNEXPECTED


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception tells of a neighbour's death, not of a cause."""
    return any(
        isinstance(cause, ConnectionError)
        or type(cause).__name__ in ("DistBackendError", "DistNetworkError")
        or (isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _who() -> str:
    if _world_size() == 1:
        return "failed"
    stage = f" (stage {', '.join(map(str, _stages))})" if _stages else ""
    return f"rank {os.environ.get('RANK', '0')}{stage} failed first"


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _end_failed(error: Exception) -> NoReturn:
    report, code = describe_failure(error)
    patience = 0.0
    if is_lost_connection(error):
        patience = SECONDS_FOR_THE_CAUSE
        if this_machine().count > 1:  # the watch tells better who was lost
            patience = SECONDS_FOR_THE_WATCH
            report = report.replace(" failed first: ", " lost a neighbour that told no cause: ", 1)
    _end(report, code, patience=patience)


def _end_interrupted() -> NoReturn:
    _end(stop.words_before_the_first_step(), stop.stop_code() or INTERRUPTED, patience=0.0)


def end_stopped(report: str, code: int) -> NoReturn:
    """Ends all ranks at once because of a signal, without waiting for a save."""
    _end(report, code, patience=0.0)


def end_overdue(what: str, code: int) -> NoReturn:
    """Ends all ranks because the stop that a signal asked for takes too long."""
    _end(_line("stopped", os.environ.get("RANK", "0"), place(), what), code, patience=0.0)


def end_hung(what: str, *, rank: int, where: Place) -> NoReturn:
    """Ends all ranks because `rank` makes no progress.

    Args:
        where: what it did last.
    """
    _end(_line(HangError.kind, rank, where, what), HangError.exit_code, patience=0.0)


def _line(kind: str, rank: int | str, where: Place, what: str) -> str:
    """`error[hang] rank=1 stage=1 step=3: ...`; what is not known is left out."""
    facts = {"rank": rank, "stage": where.stage, "step": where.step}
    told = "".join(f" {name}={value}" for name, value in facts.items() if value is not None)
    return f"error[{kind}]{told}: {what}\n"


def end_lost(what: Machine | str, why: str) -> NoReturn:
    """Ends this process because another machine is gone, unless a rank there told the cause."""
    report = (
        f"lost contact with {what}: {why}. Its own output may say more; else it was switched off, "
        "killed, or cut off the network.\n"
    )
    lost = what.index if isinstance(what, Machine) else 0
    _end(report, UNEXPECTED, patience=SECONDS_FOR_THE_CAUSE, lost=lost)


def end_as_told() -> NoReturn:
    """Ends this process because a rank has claimed the report."""
    _end("ended because another rank had failed.\n", UNEXPECTED, patience=0.0)


def _end(report: str, code: int, *, patience: float, lost: int | None = None) -> NoReturn:
    """Reports unless another rank has the claim, then ends the process at once."""
    stop.hold_main_thread()
    machine = this_machine()
    rank = os.environ.get("RANK", "0")
    headline = report.splitlines()[0]
    mine = {"rank": rank, "code": code, "machine": machine.index, "host": machine.host}
    board, winner = claim_report(
        {**mine, "headline": headline}, patience=patience, is_store_lost=lost == 0
    )
    stop.begin_to_end()  # not before: while it waits for a cause, a launcher may know one
    with contextlib.suppress(Exception):  # the store may end with its machine at any time
        if winner is None:
            _print(report)
            board.wait_heard(SECONDS_TO_BE_HEARD, but=lost)
            board.mark_reported()
            end_the_rest()
        elif winner["machine"] == machine.index:
            # an agent ends all ranks as soon as one is gone: let the first one finish its report
            board.wait_reported(SECONDS_FOR_THE_REPORT)
        elif board.is_first_to_hear():
            _print(f"{winner['headline']} [told by rank {winner['rank']} on {winner['host']}]\n")
            end_the_rest()
        else:
            time.sleep(SECONDS_FOR_A_LINE)
    end_helpers()
    sys.stdout.flush()
    os._exit(code if winner is None else winner["code"])


def _print(report: str) -> None:
    sys.stdout.flush()
    print(("\n" if sys.stderr.isatty() else "") + report, end="", file=sys.stderr, flush=True)
