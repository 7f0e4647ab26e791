"""Starts the processes of a run from a plain `python train_pp.py`, in place of torchrun.

It starts them as torchrun does (the same environment), so an entry file works under both. What it
adds: the exit code of the rank that failed first, one clean Ctrl-C, and no text of its own.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

from stageline.distributed.failure import ENDED, STAGES, TOLD
from stageline.distributed.failure_record import (
    FailureRecord,
    first_of,
    log_with_words,
    read_record,
    write_first,
)
from stageline.distributed.guard import GuardRules, start_guard
from stageline.distributed.machines import this_machine
from stageline.distributed.stop import (
    CODES,
    MIN_SECONDS_BETWEEN,
    WORKERS_FOLDER,
    die_with_parent,
    read_notes,
    release_signals,
)
from stageline.errors import CRASH, PREEMPTED

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# after the deadline of the workers, who are then about to end by themselves
SECONDS_TO_END = 30.0
KILLED = 128 + signal.SIGKILL
LAUNCHER = "STAGELINE_LAUNCHER"  # its process id, for its workers


@dataclass
class SignalsForWorkers:
    """The launcher's handlers; the first signal is passed on, a second one of its kind ends all.

    Workers have sessions of their own: no key press and no signal to a process group gets there.

    Args:
        folder: each worker leaves a file `RANK.pid` there.
        patience: seconds that the workers may take to save; 0: for ever.
    """

    folder: Path
    num_processes: int
    patience: float
    times: dict[int, float] = field(default_factory=dict, init=False)
    code: int | None = field(default=None, init=False)

    def install(self) -> None:
        """Takes over from the handlers of a worker."""
        release_signals()
        for signum in (*CODES, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def code_of(self, code: int) -> int:
        """The exit code of the run; that of the signal where the end of the workers tells none."""
        # workers that do not handle it yet die of it
        tells_none = code in (0, 1, CRASH, PREEMPTED, KILLED)
        return self.code if self.code is not None and tells_none else code

    def _pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = signum not in self.times
        first = self.times.setdefault(signum, now)
        if not is_first:
            if now - first >= MIN_SECONDS_BETWEEN:
                self._end(signal.SIGKILL, "signalled twice")
            return
        # workers know no SIGHUP: a terminal that is closed may send it to helpers, too
        passed_on = signal.SIGTERM if signum == signal.SIGHUP else signal.Signals(signum)
        if self.code is None:
            self.code = CODES[passed_on]
            if self.patience:
                signal.setitimer(signal.ITIMER_REAL, self.patience + SECONDS_TO_END)
        pids = self._pids()
        if len(pids) < self.num_processes:  # still starting: there is nothing to save
            self._end(signal.SIGTERM, "signalled at the start")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, passed_on)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        print(
            f"error[stopped]: the workers did not end within {self.patience + SECONDS_TO_END:g} s "
            "of a signal; they were killed. The last checkpoint is what counts.",
            file=sys.stderr,
        )
        self._end(signal.SIGKILL, "too slow")

    def _end(self, signum: signal.Signals, why: str) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        raise SignalException(why, sigval=signum)


_HINTS = {
    signal.SIGKILL: "the system may have run out of memory",
    signal.SIGBUS: "a file may have been changed while it was read",
}


def judge(folder: Path, codes: Mapping[int, int], *, num_processes: int) -> int:
    """Reports the failure if no rank did.

    A rank that raised has told so. One that a signal ended, or that left in the middle, told
    nothing: its neighbours lost a connection and keep quiet, the launcher speaks for it.

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
    found = [(rank, code) for rank, code in silent.items() if code != -signal.SIGTERM]
    found += [(rank, 0) for rank in sorted(set(range(num_processes)) - set(codes) - set(ended))]
    if not ended:
        found += silent.items()
    if not found:
        return None
    rank, code = found[0]
    stages = read_notes(folder, STAGES).get(rank, [])
    return FailureRecord(
        kind="crash",
        code=CRASH,
        message=_how(code, rank),
        rank=rank,
        num_ranks=num_processes,
        stages=tuple(stages),
        stage=stages[0] if len(stages) == 1 else None,
        host=this_machine().host,
        time_ns=time.time_ns(),
    )


def _how(code: int, rank: int) -> str:
    if code >= 0:
        return f"ended with exit status {code} in the middle of the run, without a word"
    number = signal.Signals(-code)
    more = [number.name, _HINTS.get(number, "")]
    log = log_with_words(rank)
    more += [f"threads: {log}" if log else ""]
    return f"killed by signal {-code} ({'; '.join(filter(None, more))})"


DEFAULT_RULES = GuardRules()


def launch_if_needed(
    num_processes: int,
    *,
    argv: Sequence[str] | None = None,
    rules: GuardRules = DEFAULT_RULES,
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
    # ours passes its number on: it may have been killed while this process was starting
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    if folder is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    if folder is None:
        return
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(CRASH)
    draft = Path(folder, f"{os.environ['RANK']}.draft")
    draft.write_text(str(os.getpid()))
    draft.replace(draft.with_suffix(".pid"))


def _end_with(parent: int) -> None:
    """Ends this process when its launcher was killed: nobody could stop it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(CRASH)


def _launch(num_processes: int, *, argv: list[str], rules: GuardRules) -> NoReturn:
    """Runs workers below torchrun's agent until they have ended; reports what nobody else did."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence("torch.distributed.elastic", "torch.distributed.launcher")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: processes share the cores
    with tempfile.TemporaryDirectory(prefix="stageline_") as folder:
        os.environ |= {WORKERS_FOLDER: folder, LAUNCHER: str(os.getpid())}
        signals = SignalsForWorkers(
            Path(folder), num_processes=num_processes, patience=rules.stop_deadline
        )
        signals.install()
        try:
            config = _launch_config(num_processes, folder)
            elastic_launch(config, sys.executable)("-u", *argv)
            code = 0
        except ChildFailedError as error:
            failed = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            codes = {rank: failure.exitcode for rank, failure in failed}
            code = judge(Path(folder), codes, num_processes=num_processes)
        except SignalException as error:
            code = 128 + error.sigval
    sys.exit(signals.code_of(code))


def _launch_config(num_processes: int, folder: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
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


def _silence(*prefixes: str) -> None:
    """Keeps torch's own account of a failure off the screen; the rank's report says it better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).disabled = True


_SECONDS_TO_ANSWER = 0.01
_NAME = "stageline/meeting"


def launchers_store(rank: int, world_size: int, *, timeout: float) -> Store | None:
    """The store for the process group of this start; None: torch finds one by itself.

    torchrun keeps one store over all its restarts, and torch writes the addresses of the ranks
    under the same names each time (pytorch issues 135712, 167288): a rank that is started anew
    would read those of dead ones. So each start has names of its own. torchrun counts restarts, but
    not on machines that only follow the restart of another one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return PrefixStore(agree(store, rank, world_size, timeout=timeout), store)


def agree(store: Store, rank: int, world_size: int, *, timeout: float) -> str:
    """A name of this start, the same on all ranks and on none of an earlier start.

    Each rank asks with a word of its own, the first one answers to that word: what earlier starts
    left in the store is answered too, and nobody reads it.

    Raises:
        TimeoutError, RuntimeError: a rank did not come.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"{_NAME}/asks/{rank}", word)
        name = store.get(f"{_NAME}/answer/{word}").decode()
        store.set(f"{name}/here/{rank}", "1")
        return name
    name = f"{_NAME}/{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            _answer(store, other, name)
        missing = {other for other in missing if not store.check([f"{name}/here/{other}"])}
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come in {timeout:g} s")
        time.sleep(_SECONDS_TO_ANSWER)
    return name


def _answer(store: Store, rank: int, name: str) -> None:
    if store.check([f"{_NAME}/asks/{rank}"]):
        word = store.get(f"{_NAME}/asks/{rank}").decode()
        store.set(f"{_NAME}/answer/{word}", name)
