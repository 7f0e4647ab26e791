"""One thread, no network, registers and defaults restored: what every test stands on."""

import gc
import importlib.util
import multiprocessing
import os
from collections import Counter
from itertools import groupby
from pathlib import Path

# before torch is imported: forked ranks must not inherit a pool of threads
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# some hundred short runs: what the proof at their start finds is for its own tests
os.environ["STAGELINE_PROVE_SPLIT"] = "never"

import pytest
import torch

import commands  # noqa: F401 - which tells errors how options are spelled
from register import restored_registers

torch.set_num_threads(1)
gc.disable()  # until all tests are found: nearly half of that time went into looking for garbage
if not torch.cuda.is_available():
    # torch.manual_seed writes down the stack for each backend that may start later: a millisecond
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.manual_seed_all = lambda seed: None

SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "openai")
if any(importlib.util.find_spec(name) is None for name in SERVER_PACKAGES):
    collect_ignore_glob = ["unit/test_serve_*.py", "unit/test_serving_*.py"]


def pytest_collection_modifyitems(config, items):
    """Leaves most combinations out of tests marked `each_value`, unless somebody asks for all.

    Such a test takes seconds and has stacked parameters. Each value of each of them runs in some
    combination; all combinations run with STAGELINE_TESTS=all, or where the file is named.
    """
    named = any(not Path(name).is_dir() for name in config.args)
    if named or os.environ.get("STAGELINE_TESTS") == "all":
        return
    chosen = []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        chosen += _each_value_once(cases) if cases[0].get_closest_marker("each_value") else cases
    items[:] = chosen


def _each_value_once(cases):
    """Of a product of parameters as few cases as hold each value, spread evenly."""
    values = [{(name, id(v)) for name, v in case.callspec.params.items()} for case in cases]
    missing = set().union(*values)
    uses, kept = Counter(), []
    while missing:
        best = max(
            (place for place in range(len(cases)) if place not in kept),
            key=lambda place: (
                len(values[place] & missing),
                -sum(uses[value] for value in values[place]),
            ),
        )
        kept.append(best)
        missing -= values[best]
        uses.update(values[best])
    return [cases[place] for place in sorted(kept)]


def pytest_collection_finish():
    """Leaves what the libraries hold out of garbage collection: a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _clean_state():
    """Restores registers, default dtype and seeds after each test."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    with restored_registers():
        yield
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
