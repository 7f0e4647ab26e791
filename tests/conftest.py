"""The base of every test: one thread, no network, registers and defaults restored."""

import faulthandler
import functools
import gc
import importlib.util
import multiprocessing
import os
import re
import sys
import threading
import time
from pathlib import Path

# before torch is imported: forked ranks must not inherit a pool of threads
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# some hundred short runs: what the proof at their start finds is for its own tests
os.environ["STAGELINE_PROVE_SPLIT"] = "never"

import pytest
import torch
import tqdm
from _pytest.assertion import rewrite

import commands  # noqa: F401 - which tells errors how options are spelled
from stageline import progress
from tests.helpers.registers import restored_registers

torch.set_num_threads(1)
# its own lock is one for all forks, and a rank that is killed while it holds it keeps it for ever;
# its thread may hold any lock while a rank is forked
tqdm.tqdm.set_lock(threading.RLock())
tqdm.tqdm.monitor_interval = 0
gc.disable()  # until all tests are found: nearly half of that time went into looking for garbage
if not torch.cuda.is_available():
    # torch.manual_seed writes down the stack for each backend that may start later: a millisecond
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.manual_seed_all = lambda seed: None


def _without_meta(fill):
    """Return a function of torch.nn.init that leaves tensors on meta, which have no values."""
    return functools.wraps(fill)(
        lambda tensor, *args, **kwargs: tensor if tensor.is_meta else fill(tensor, *args, **kwargs)
    )


# torch computes their random start in Python: a quarter of the time that a model on meta takes
for name in ("uniform_", "normal_", "kaiming_uniform_", "zeros_", "ones_"):
    setattr(torch.nn.init, name, _without_meta(getattr(torch.nn.init, name)))

SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "openai")
if any(importlib.util.find_spec(name) is None for name in SERVER_PACKAGES):
    collect_ignore_glob = ["unit/test_serve_*.py", "unit/test_serving_*.py"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Rewrite the assertions of the tests before workers start, each of which would do it too."""
    given = [Path(one.partition("::")[0]) for one in config.args]
    files = (file for one in given for file in ([one] if one.is_file() else one.rglob("test_*.py")))
    for path in [] if sys.dont_write_bytecode else files:
        cache = rewrite.get_cache_dir(path)
        pyc = cache / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, pyc) is None and rewrite.try_makedirs(cache):
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, pyc)


def pytest_collection_modifyitems(items):
    """Mark the tests of slow.txt, which scripts/test.sh leaves out without --all."""
    lines = Path(__file__).with_name("slow.txt").read_text().splitlines()
    patterns = []
    for line in (line for line in lines if line and not line.startswith("#")):
        name, _, cases = line.removeprefix("!").removesuffix("]").partition("[")
        some = "|".join(re.escape(case).replace(r"\*", ".*") for case in cases.split(" | "))
        rest = rf"\[({some})\]" if cases else r"(::.*|\[.*)?"
        patterns.append((re.compile(f"tests/{re.escape(name)}{rest}"), not line.startswith("!")))
    for item in items:
        matching = [is_slow for pattern, is_slow in patterns if pattern.fullmatch(item.nodeid)]
        if matching and matching[-1]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Exclude the objects of imported packages from garbage collection: a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_logreport(report):
    """Report a failure at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        why = "\n".join(report.longreprtext.splitlines()[-4:])
        print(f"\n{report.nodeid} failed after {report.duration:.0f} s:\n{why}", flush=True)


class _HungTests:
    """A test of a worker that hangs shows all threads and ends the run: others would hang, too.

    The timer pauses while a process is forked: one that has it would wait for the timer's thread,
    which it does not have, as soon as it set or cancelled a timer of its own.
    """

    def __init__(self) -> None:
        self._stderr = os.dup(2)
        self._until: float | None = None
        os.register_at_fork(
            before=self._pause, after_in_parent=self._set, after_in_child=self._forget
        )

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return None  # a single process continues
        self._until = time.monotonic() + settings.timeout
        self._set()
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self):
        self._pause()
        self._forget()

    def _set(self) -> None:
        if self._until is not None:
            left = max(self._until - time.monotonic(), 1.0)
            faulthandler.dump_traceback_later(left, exit=True, file=self._stderr)

    def _pause(self) -> None:
        if self._until is not None:
            faulthandler.cancel_dump_traceback_later()

    def _forget(self) -> None:
        self._until = None


def pytest_configure(config):
    config.pluginmanager.register(_HungTests())


@pytest.fixture(autouse=True)
def _clean_state():
    """Restores registers, default dtype and seeds after each test."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    place = progress._place
    with restored_registers():
        yield
    progress._place = place
    torch.set_default_dtype(dtype)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    """Ends the workers of loaders that a test has left behind.

    torch raises the death of a worker in whatever test runs when it is noticed.
    """
    yield
    if multiprocessing.active_children():
        gc.collect()
