"""`PYTEST_PLUGINS=tests.helpers.emulated_gpu.plugin pytest`: tests for cards where no card is.

It enters emulated cards for the whole session. Where torch is built for real cards, or none can
be emulated, it does nothing; the end of the run says which. Fixtures: tests/gpu/conftest.py.
"""

import os

import pytest

from tests.helpers.emulated_gpu.native import Unavailable, load

os.environ["OMP_NUM_THREADS"] = "1"  # tests/conftest.py sets this, too, but comes after torch then
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # its threads would ask for cards that they don't see
_native, _why = None, ""
try:
    _native = load()
except Unavailable as reason:
    _why = str(reason)

import torch  # noqa: E402 (it asks for the guard and the hooks once)

from tests.helpers.emulated_gpu.cards import Cards  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Enters the cards."""
    if _native is not None:
        Cards(_native).__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cards."""
    if Cards.entered is not None:
        Cards.entered.__exit__(None, None, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the cards that tests ran on."""
    terminalreporter.write_line(f"cards: {_told()}")


def _told() -> str:
    if Cards.entered is not None:
        return "emulated; true values, but no kernels, NCCL or speed (docs/gpu.md)"
    if torch.accelerator.is_available():
        return f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
    return f"none, and none can be emulated: {_why}"
