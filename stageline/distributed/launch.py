"""Starts the processes of a run from a plain `python train_pp.py`, in place of torchrun.

It starts them as torchrun does (the same environment), so an entry file works under both. What it
adds: the exit code of the rank that failed first, one clean Ctrl-C, and no text of its own.
"""

import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from stageline.distributed.guard import GuardRules, start_guard
from stageline.distributed.neighbours import die_with_parent
from stageline.distributed.pass_on import SignalsForWorkers
from stageline.distributed.verdict import judge
from stageline.distributed.worker_notes import WORKERS_FOLDER
from stageline.errors import CRASH

DEFAULT_RULES = GuardRules()


def launch_if_needed(
    num_processes: int, *, argv: Sequence[str] | None = None, rules: GuardRules = DEFAULT_RULES
) -> None:
    """Returns in a worker, and where one process is enough; otherwise starts workers and exits.

    Args:
        num_processes: workers, all on this machine.
        argv: what the workers run, the file first; by default what this process runs.
        rules: of the guard that each worker, or the lone process, starts.

    Raises:
        SystemExit: when the workers have ended, with the code of the run.
    """
    if "RANK" in os.environ:
        _register_worker()
    elif num_processes > 1:
        _launch(num_processes, argv=list(sys.argv if argv is None else argv), rules=rules)
    start_guard(rules)


def _register_worker() -> None:
    """Watches over the launcher; leaves the process id for ours, who passes Ctrl-C on to it."""
    folder = os.environ.get(WORKERS_FOLDER)
    if folder is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if folder is None:
        return
    die_with_parent()
    draft = Path(folder, f"{os.environ['RANK']}.draft")
    draft.write_text(str(os.getpid()))
    draft.replace(draft.with_suffix(".pid"))


def _end_with(parent: int) -> None:
    """Ends this process when its launcher was killed: nobody could stop it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(CRASH)


def _launch(num_processes: int, *, argv: list[str], rules: GuardRules) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic", "torch.distributed.launcher")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: processes share the cores
    with tempfile.TemporaryDirectory(prefix="stageline_") as folder:
        os.environ[WORKERS_FOLDER] = folder
        signals = SignalsForWorkers(
            Path(folder), num_processes=num_processes, patience=rules.stop_deadline
        )
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # 0: any free port
            local_addr="localhost",  # the machine's own name need not resolve
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
        )
        signals.install()
        try:
            elastic_launch(config, sys.executable)("-u", *argv)
            code = 0
        except ChildFailedError as error:
            failed = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            codes = {rank: failure.exitcode for rank, failure in failed}
            code = judge(Path(folder), codes, num_processes=num_processes)
        except SignalException as error:
            code = 128 + error.sigval
    sys.exit(signals.code_of(code))


def _silence(*prefixes: str) -> None:
    """Keeps torch's own account of a failure off the screen; the rank's report says it better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).disabled = True
