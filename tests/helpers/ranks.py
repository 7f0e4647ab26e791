"""Runs a function on several gloo ranks of this machine and returns what each rank returned."""

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.plans import learn_plans, leave_plans


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: object, timeout: float = 120.0
) -> list[Any]:
    """Calls `function(rank, *args)` on `num_ranks` forked processes with a gloo group.

    Forked, so that functions of a test file need not be importable and torch is not imported
    again; the caller must run with one thread (tests/conftest.py sees to it).

    Returns:
        What each rank returned: tensors, numbers, strings and containers of them.

    Raises:
        AssertionError: a rank raised (its traceback is the message) or `timeout` seconds passed.
    """
    learn_plans()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _run_child(function, rank, num_ranks, args, Path(folder))
            pids.append(pid)
        _wait_for(pids, Path(folder), time.monotonic() + timeout)
        return [
            torch.load(Path(folder) / f"result_{rank}.pt", weights_only=True)
            for rank in range(num_ranks)
        ]


def keep_to_a_core(rank: int) -> None:
    """Keeps the threads of a forked rank on one core, where none interrupts another.

    gloo's own thread spins while one that was interrupted holds the lock of a connection: on two
    busy cores that took a fifth of a rank's time.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(os.getppid() + rank) % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def spare_collections() -> None:
    """Keep a forked process from looking for garbage often: a third of a second for all of torch.

    What it makes itself is looked through seldom; a twentieth of a rank's time went into that.
    """
    gc.freeze()
    gc.set_threshold(50_000)


def _run_child(
    function: Callable[..., Any], rank: int, num_ranks: int, args: tuple, folder: Path
) -> None:
    spare_collections()
    code = 1
    try:
        if num_ranks > 1:
            keep_to_a_core(rank)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        torch.save(result, folder / f"result_{rank}.pt")
        leave_plans()
        code = 0
    except BaseException:
        (folder / f"{time.monotonic():018.6f}_{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a forked pytest must not tear the parent's fixtures down


def _wait_for(pids: list[int], folder: Path, deadline: float) -> None:
    """Waits for all children; ends the rest as soon as one failed."""
    waiting = dict(enumerate(pids))
    failed = False
    while waiting and not failed and time.monotonic() < deadline:
        for rank, pid in list(waiting.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del waiting[rank]
                failed = failed or status != 0
        time.sleep(0.01)
    for pid in waiting.values():
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    errors = sorted(folder.glob("*.error"))
    if errors:
        rank = errors[0].stem.rpartition("_")[2]
        raise AssertionError(f"rank {rank} failed first:\n{errors[0].read_text()}")
    if failed or waiting:
        raise AssertionError(f"ranks {sorted(waiting)} did not finish in time or died")
