"""Starts the processes of a run from a plain `python train_pp.py`, in place of torchrun.

It starts them as torchrun does (the same environment), so an entry file works under both. What it
adds: the exit code of the rank that failed first, one clean Ctrl-C, and no text of its own.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stageline.distributed.interrupt import INTERRUPTED, MIN_SECONDS_BETWEEN
from stageline.distributed.verdict import judge
from stageline.distributed.watch import watch_claims, watch_machines
from stageline.distributed.worker_notes import WORKERS_FOLDER
from stageline.errors import CRASH


def launch_if_needed(
    num_processes: int, *, argv: Sequence[str] | None = None, lost_after: float = 30.0
) -> None:
    """Returns in a worker, and where one process is enough; otherwise starts workers and exits.

    Args:
        num_processes: workers, all on this machine.
        argv: what the workers run, the file first; by default what this process runs.
        lost_after: below a torchrun on several machines, seconds without a sign of life after
            which a machine is lost; 0: for ever.

    Raises:
        SystemExit: when the workers have ended, with the code of the run.
    """
    if "RANK" in os.environ:
        _register_worker()
        watch_machines(lost_after=lost_after)
        watch_claims()
        return
    if num_processes > 1:
        _launch(num_processes, argv=list(sys.argv if argv is None else argv))


def _register_worker() -> None:
    """Watches over the launcher; leaves the process id for ours, who passes Ctrl-C on to it."""
    folder = os.environ.get(WORKERS_FOLDER)
    if folder is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if folder is None:
        return
    draft = Path(folder, f"{os.environ['RANK']}.draft")
    draft.write_text(str(os.getpid()))
    draft.replace(draft.with_suffix(".pid"))


def _end_with(parent: int) -> None:
    """Ends this process when its launcher was killed: nobody could stop it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(CRASH)


def _launch(num_processes: int, *, argv: list[str]) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic", "torch.distributed.launcher")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: processes share the cores
    with tempfile.TemporaryDirectory(prefix="stageline_") as folder:
        os.environ[WORKERS_FOLDER] = folder
        interrupts = _Interrupts(Path(folder), num_processes)
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
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        signal.signal(signal.SIGINT, interrupts.on_signal)
        try:
            elastic_launch(config, sys.executable)("-u", *argv)
            code = 0
        except ChildFailedError as error:
            failed = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            codes = {rank: failure.exitcode for rank, failure in failed}
            code = judge(Path(folder), codes, num_processes=num_processes)
        except SignalException as error:
            code = 128 + error.sigval
    if interrupts.first is not None and code in (0, CRASH, 128 + signal.SIGTERM, 137):
        code = INTERRUPTED
    sys.exit(code)


class _Interrupts:
    """Passes Ctrl-C on to the workers: they have sessions of their own, no key press gets there."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.folder = folder
        self.num_processes = num_processes
        self.first: float | None = None

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        now = time.monotonic()
        if self.first is None:
            self.first = now
            pids = [int(path.read_text()) for path in self.folder.glob("*.pid")]
            if len(pids) < self.num_processes:  # still starting: there is nothing to save
                raise SignalException("interrupted at the start", sigval=signal.SIGTERM)
            for pid in pids:
                _send(pid)
        elif now - self.first >= MIN_SECONDS_BETWEEN:
            raise SignalException("interrupted twice", sigval=signal.SIGKILL)


def _send(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError:  # it has just ended
        return


def _silence(*prefixes: str) -> None:
    """Keeps torch's own account of a failure off the screen; the rank's report says it better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).disabled = True
