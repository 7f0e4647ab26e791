"""Start the processes of a run from a plain `python train_pp.py`, by the agent of torchrun.

The agent starts them, notices within 0.1 s that one has ended, and ends the others. What this adds:
one line that says which rank failed first and why, and its exit code.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from stageline.distributed import failure_record
from stageline.distributed.failure import tell
from stageline.distributed.stop import CODES, release_signals
from stageline.distributed.watchdog import WatchdogRules, start_watchdog
from stageline.errors import CRASH

SECONDS_TO_SAVE = 30.0  # beyond the deadline of the workers, who are then about to end
SECONDS_TO_END = 5  # a rank that is left gets this long before SIGKILL
# this signal ends the ranks that are left: no worker handles it, so none tries to save
END_SIGNAL = signal.SIGUSR2
_HINTS = {
    signal.SIGKILL: "the system may have run out of memory",
    signal.SIGBUS: "a file may have been changed while it was read",
}
DEFAULT_RULES = WatchdogRules()


def launch_if_needed(num_processes: int, *, rules: WatchdogRules = DEFAULT_RULES) -> None:
    """Return in a worker, and where one process is enough; otherwise start workers and exit.

    Args:
        num_processes: workers, all on this machine; they run what this process runs.
        rules: of the watchdog that each worker, or the lone process, starts.

    Raises:
        SystemExit: when the workers have ended, with the code of the run.
    """
    if "RANK" not in os.environ and num_processes > 1:
        _launch(num_processes, patience=rules.stop_deadline)
    start_watchdog(rules)


def _launch(num_processes: int, *, patience: float) -> NoReturn:
    """Run workers until they have ended.

    Args:
        patience: seconds that they may take to save after a signal; 0: any number.
    """
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        PContext,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).disabled = True  # the line of the rank says it better
    close = PContext.close

    def close_in_time(self: PContext, death_sig: Any = None, timeout: float = 0) -> None:
        """Pass a signal on with time to save; end the other ranks when one has failed.

        The agent names no signal then, and gives the others 30 s after a SIGTERM. A choice of the
        time to save came with torch 2.13.
        """
        if death_sig is None:
            close(self, END_SIGNAL, SECONDS_TO_END)
        else:
            close(self, death_sig, int(patience + SECONDS_TO_SAVE) if patience else 10**6)

    PContext.close = close_in_time  # type: ignore[method-assign]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too: processes share the cores
    os.environ[failure_record.LAUNCHER] = str(os.getpid())
    release_signals()
    passed_on = [signum for signum in CODES if signal.getsignal(signum) != signal.SIG_IGN]
    for signum in passed_on:
        signal.signal(signum, signal.SIG_DFL)  # until the agent takes them
    codes: dict[int, int] = {}
    asked = 0
    with tempfile.TemporaryDirectory(prefix="stageline_") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # 0: any free port
            local_addr="localhost",  # the machine's own name need not resolve
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(signum.name for signum in passed_on),
        )
        try:
            elastic_launch(config, sys.executable)("-u", *sys.argv)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            asked = CODES[error.sigval]
        first = first_failure(Path(folder), codes, num_ranks=num_processes)
    if first is not None:
        tell(first)
    # workers that handle no signal yet die of it, without a report
    sys.exit(first.code if first is not None else asked)


def first_failure(
    folder: Path, codes: Mapping[int, int], *, num_ranks: int
) -> failure_record.FailureRecord | None:
    """The failure that ended a run; None: there was none, or a signal ended it at its start.

    Args:
        folder: of the agent's logs, with the error files of the ranks.
        codes: rank -> exit code, negative for a signal, of those that ended with another than 0;
            in the order in which they ended.
    """
    records = failure_record.read_error_files(folder)
    # the earliest; one that only follows from another's end counts where there is no other
    by_cause = sorted(records.values(), key=lambda one: (one.is_secondary, one.time_ns))
    first = by_cause[0] if by_cause else None
    if not codes or (first is not None and not first.is_secondary):
        return first
    # one that a signal ended, or that left in the middle: the others have only lost a connection
    silent = [(rank, codes[rank]) for rank in codes if rank not in records]
    silent = [item for item in silent if item[1] != -END_SIGNAL]
    silent += [(rank, 0) for rank in range(num_ranks) if rank not in codes]
    if not silent:
        return first
    rank, code = silent[0]
    stages = failure_record.stages_of(folder, rank)
    message = f"ended with exit status {code} in the middle of the run, without a word"
    if code < 0:
        number, log = signal.Signals(-code), failure_record.log_with_words(rank)
        more = [number.name, _HINTS.get(number, ""), f"threads: {log}" if log else ""]
        message = f"killed by signal {-code} ({'; '.join(filter(None, more))})"
    return failure_record.FailureRecord(
        kind="crash",
        code=CRASH,
        message=message,
        rank=rank,
        num_ranks=num_ranks,
        stages=stages,
        stage=stages[0] if len(stages) == 1 else None,
        host=socket.gethostname(),
        time_ns=time.time_ns(),
    )
