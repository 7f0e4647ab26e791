"""One thread, no network, registers and defaults restored: what every test stands on."""

import gc
import importlib.util
import multiprocessing
import os

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
