"""Runs an entry file below its real launcher or torchrun, with forks in place of new Pythons.

The launcher's own code runs as it is: it starts workers, waits for them, passes signals on, judges.
Only that a worker begins with what this process has imported is not as a user has it: a run so
takes three seconds of a core in place of fifteen. One real start of each kind is tested besides.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from stageline.distributed.stop import PR_SET_PDEATHSIG
from tests.helpers import faults
from tests.helpers.house import newer_modules, prepare_house
from tests.helpers.plans import learn_plans
from tests.helpers.ranks import keep_to_a_core
from tests.helpers.small_run import Finished, Job, run_and_exit


class WarmLauncher:
    """A launcher that was just forked, in a process group of its own.

    Args:
        words: what would stand behind `python`: a file or `-m` and a module, its options.
        environment: added to this process's.
        enter: called in the fork before all else.
        output: a file that takes what it and its workers print, of both kinds.
    """

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str] = {},
        *,
        enter: Callable[[], None] = lambda: None,
        output: Path | None = None,
    ) -> None:
        prepare_house()
        learn_plans()
        self.code: int | None = None
        self._files = tempfile.TemporaryDirectory()
        self._texts = [output or Path(self._files.name, kind) for kind in ("out", "err")]
        self._started_at = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(words, self._texts, lambda: _prepare(environment, enter))

    def poll(self) -> int | None:
        """Its exit code, a signal negative; None while it runs."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def wait(self, timeout: float = 120) -> int:
        """Waits until it has ended.

        Raises:
            AssertionError: it still runs after `timeout` seconds; its group is killed.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {timeout} s: {self._told()}")
            time.sleep(0.02)
        return self.code

    def finish(self, timeout: float = 120) -> Finished:
        """Wait as `wait` does; return the exit code and all output, also of its workers."""
        code = self.wait(timeout)
        finished = Finished(code, *self._told(), time.monotonic() - self._started_at)
        self._files.cleanup()
        return finished

    def _told(self) -> list[str]:
        return [path.read_text() for path in self._texts]


def launch(
    job: Job,
    name: str,
    *options: str | Path | int,
    chaos: str = "",
    torchrun: tuple[str | int, ...] = (),
) -> WarmLauncher:
    """Starts a run below a launcher, from a fork."""
    words = job.command(name, *options, torchrun=torchrun)[1:]
    return WarmLauncher(words, {**faults.environment(chaos), "OMP_NUM_THREADS": "1"})


def live_processes() -> dict[int, int]:
    """Process -> parent; one that has ended and waits to be fetched is not live."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            found[int(file.parent.name)] = int(parent)
    return found


class _Worker(subprocess.Popen):
    """A fork of this process that torch's launcher takes for a process that it has started."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.args, self.returncode = words, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = subprocess.threading.Lock()
        self._child_created = True
        self.pid = os.fork()
        if self.pid == 0:
            _become_worker(words, environment)


def _prepare(environment: Mapping[str, str], enter: Callable[[], None]) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    enter()
    os.setsid()
    os.environ.update(environment)
    # torch reads TORCH_CPP_LOG_LEVEL when it is loaded: once more
    ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))._ZN3c1011initLoggingEv()
    # for its own log it looks through all modules, of which there are thousands here: a second
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    SubprocessHandler._popen = lambda self, words, env: _Worker(list(words), env)


def _become_worker(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    def prepare() -> None:
        os.setsid()
        # a fork of a process that listens for signals has asked for this already; a new one has not
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        os.environ.clear()
        os.environ.update(environment)
        if environment["LOCAL_WORLD_SIZE"] != "1":
            keep_to_a_core(int(environment["LOCAL_RANK"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        for name in newer_modules():  # parts of a user, which fill registers
            file = getattr(sys.modules[name], "__file__", None)
            if file in words:
                del sys.modules[name]

    words = words[words.index("-u") + 1 :]
    run_and_exit(words, (), prepare)
