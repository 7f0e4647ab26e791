"""What our launcher makes of the end of its workers: which failed first, and the exit code.

A rank that raised has told so. One that a signal ended, or that left in the middle, told nothing:
its neighbours lost a connection and keep quiet, the launcher speaks for it.
"""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from stageline.distributed.failure import ENDED, STAGES, TOLD
from stageline.distributed.failure_files import log_with_words, write_first
from stageline.distributed.machines import this_machine
from stageline.distributed.record import FailureRecord, first_of, read_record
from stageline.distributed.worker_notes import read_notes
from stageline.errors import CRASH

_HINTS = {
    signal.SIGKILL: "the system may have run out of memory",
    signal.SIGBUS: "a file may have been changed while it was read",
}


def judge(folder: Path, codes: Mapping[int, int], *, num_processes: int) -> int:
    """Reports the failure if no rank did.

    Args:
        folder: the workers' notes.
        codes: rank -> exit code, negative for a signal, of those that ended with another than 0;
            in the order in which they failed.

    Returns:
        The exit code of the run.
    """
    told = list(map(read_record, read_notes(folder, TOLD).values()))
    causes = [record for record in told if not record.is_secondary]
    if causes:
        return first_of(causes).code
    record = _silent_end(folder, codes, num_processes)
    if record is None and told:
        record = first_of(told)
    if record is None:  # all returned a code of their own
        return next((code for code in codes.values() if code > 0), CRASH)
    write_first(record)
    print(record.report(), end="", file=sys.stderr, flush=True)
    return record.code


def _silent_end(folder: Path, codes: Mapping[int, int], num_processes: int) -> FailureRecord | None:
    """The rank that ended without a word, if there is one."""
    ended = read_notes(folder, ENDED)
    silent = {rank: code for rank, code in codes.items() if rank not in ended}
    # the launcher ends the rest by SIGTERM as soon as one is gone
    own = {rank: code for rank, code in silent.items() if code != -signal.SIGTERM}
    for rank, code in own.items():
        return _record(folder, rank, _how(code, rank), num_processes)
    for rank in sorted(set(range(num_processes)) - set(codes) - set(ended)):
        return _record(folder, rank, _how(0, rank), num_processes)
    if ended:
        return None
    for rank, code in silent.items():
        return _record(folder, rank, _how(code, rank), num_processes)
    return None


def _how(code: int, rank: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} in the middle of the run, without a word"
    number = signal.Signals(-code)
    more = [number.name, _HINTS.get(number, "")]
    log = log_with_words(rank)
    more += [f"threads: {log}" if log else ""]
    return f"killed by signal {-code} ({'; '.join(filter(None, more))})"


def _record(folder: Path, rank: int, message: str, num_ranks: int) -> FailureRecord:
    stages = read_notes(folder, STAGES).get(rank, [])
    return FailureRecord(
        kind="crash",
        code=CRASH,
        message=message,
        rank=rank,
        num_ranks=num_ranks,
        stages=tuple(stages),
        stage=stages[0] if len(stages) == 1 else None,
        host=this_machine().host,
        time_ns=time.time_ns(),
    )
