"""The parts and options of this repository, imported once and untouched, for forked entry files.

Tests fill and restore registers and replace parts, so an entry file that runs in a fork of a test's
process cannot use what that process has imported. To import it all again took a third of a run.
"""

import functools
import importlib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# what train_pp.py is made of; the second one it imports when it has read its options
ENTRY_PARTS = ("commands.train", "commands.train_engines")
LATE = (  # what a run imports only when it is on its way
    "torch.utils.tensorboard",
    "torch.profiler._cupti_monitor",
    "docstring_parser",
    "attr",
    "attrs",
    "datasets",
    "scipy.stats",
    "sklearn.datasets",
    "stageline.data.rows.converters",
    "stageline.data.rows.json_lines",
    "stageline.stages.causal_lm",
    "stageline.stages.vision_language",
)


_LEFT: list[dict[str, ModuleType]] = []  # to free what a fork does not use would copy its pages


def untouched_house() -> dict[str, ModuleType]:
    """Modules by name, with registers of their own; this process goes on with those it had.

    Called before a fork: one that looked at some thousand modules itself would copy their pages.
    """
    _contents()
    names = list(sys.modules)  # at once: other threads import
    _OURS[:], _LAST[:] = _ours(names), names[-1:]
    return _imported_house()


_OURS: list[str] = []  # modules of this repository
_LAST: list[str] = []  # the youngest module that was looked at


@functools.cache
def _imported_house() -> dict[str, ModuleType]:
    before = _take_out(list(sys.modules))
    sys.path.insert(0, str(ROOT))
    try:
        for name in ENTRY_PARTS + LATE:
            importlib.import_module(name)
        sys.modules["register"].import_shelf(*sys.modules["commands.train"].SHELF)
        return _take_out(list(sys.modules))
    finally:
        sys.path.remove(str(ROOT))
        _take_out(list(sys.modules))
        sys.modules.update(before)


def enter_house() -> None:
    """Lets an entry file, in a process that was just forked, find the untouched modules."""
    younger = itertools.takewhile(lambda name: name not in _LAST, reversed(sys.modules))
    _LEFT.append(_take_out({*_OURS, *younger}))
    sys.path.insert(0, str(ROOT))
    sys.modules.update(_imported_house())
    for part_register, parts in _contents():  # a launcher's worker comes here again
        part_register.data, part_register.is_frozen = dict(parts), False


@functools.cache
def _contents() -> list[tuple[Any, dict[str, Any]]]:
    registers = _imported_house()["register"].ALL_REGISTERS.values()
    return [(one, dict(one.data)) for one in registers]


def _take_out(names: Iterable[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in _ours(names)}


def _ours(names: Iterable[str]) -> list[str]:
    here, found = f"{ROOT}/", []
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if file.startswith(here):
            first = file[len(here) :].partition("/")[0]
            if first.endswith(".py") or first in ("models", "options", "commands"):
                found.append(name)
    return found
