"""Runs an entry file in a fork of this process, which has imported everything.

A start of its own costs each process six seconds of imports; what is tested through here is all
but that start and our launcher, in whose place the process forks its ranks. Tests of launchers,
signals and exit codes of killed ranks start real processes.
"""

import functools
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.helpers.house import prepare_house
from tests.helpers.plans import learn_plans
from tests.helpers.ranks import keep_to_a_core
from tests.helpers.small_run import ForkedRanks, run_and_exit

HEAVY = (  # entry files import these; they import whatever else they need as always
    "transformers",
    "stageline.checkpoint.plain_folder",
    "stageline.evaluation.report",
    "stageline.inference.decoding.engine",
    "stageline.planner.planner",
    "stageline.training.evaluation",
    "stageline.training.run_log",
    "stageline.pipeline.runner",
    "stageline.plotting.figures",
    "stageline.training.timeline",
)


def run_entry(
    words: Sequence[str | Path | int],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] = {},
    timeout: float = 120,
    until: str = "",
) -> subprocess.CompletedProcess:
    """Runs `python WORDS` to the end, without a new Python; text is captured.

    Args:
        words: the entry file, its options.
        env: added to the environment.
        until: output after which the process gets SIGTERM; empty: it ends by itself.

    Raises:
        AssertionError: it still runs after `timeout` seconds; it and its ranks are killed.
    """
    for name in HEAVY:
        importlib.import_module(name)
    words = list(map(str, words))
    prepare_house()
    learn_plans()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, kind) for kind in ("out", "err")]
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            run_and_exit(words, files, functools.partial(_prepare, cwd, env))
        code = _wait(pid, timeout, files[0], until)
        out, err = (file.read_text() for file in files)
    assert code is not None, f"still running after {timeout} s:\n{out}\n{err}"
    return subprocess.CompletedProcess(words, code, out, err)


def _wait(pid: int, timeout: float, output: Path, until: str) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if until and output.exists() and until in output.read_text():
            os.kill(pid, signal.SIGTERM)
            until = ""
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _prepare(cwd: Path | None, env: Mapping[str, str]) -> None:
    os.setsid()  # so that ranks can be killed with it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.update(env)
    _fork_instead_of_launching()


def _fork_instead_of_launching() -> None:
    from stageline.distributed import launch

    launch._launch = lambda num_processes, **_: _fork_ranks(num_processes)


def _fork_ranks(num_ranks: int) -> None:
    """Returns in each rank, with torchrun's environment; ends this process when all have ended."""
    from stageline.distributed.failure import tell

    folder = tempfile.mkdtemp()
    ranks = ForkedRanks(Path(folder, "agent"), num_ranks)
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(ranks.environment(rank))
            if num_ranks > 1:
                keep_to_a_core(rank)
            torch.set_num_threads(1)  # before two threads of a loader do, whose pool is gone
            return
        ranks.pids[rank] = pid
    while ranks.is_running():
        time.sleep(0.02)
    first = ranks.first_failure()
    shutil.rmtree(folder)
    if first is not None:
        tell(first)
    sys.exit(first.code if first else 0)
