"""The parts and options of this repository, imported once and untouched, for forked entry files.

Tests fill and restore registers and replace parts, so an entry file that runs in a fork of a test's
process cannot use what that process has imported. To import it all again took a third of a run.
"""

import functools
import importlib
import os
import sys
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
    "attrs",
    "encodings.idna",
    "stageline.data.rows.converters",
    "stageline.data.rows.json_lines",
    "stageline.data.text.messages",
    "stageline.stages.causal_lm",
    "stageline.stages.vision_language",
)


@functools.cache
def untouched_house() -> dict[str, ModuleType]:
    """Modules by name, with registers of their own; this process goes on with those it had."""
    before = _take_out()
    sys.path.insert(0, str(ROOT))
    try:
        for name in ENTRY_PARTS + LATE:
            importlib.import_module(name)
        sys.modules["register"].import_shelf(*sys.modules["commands.train"].SHELF)
        return _take_out()
    finally:
        sys.path.remove(str(ROOT))
        _take_out()
        sys.modules.update(before)


def enter_house() -> None:
    """Lets an entry file, in a process that was just forked, find the untouched modules."""
    _take_out()
    sys.path.insert(0, str(ROOT))
    sys.modules.update(untouched_house())
    for part_register, parts in _contents():  # a launcher's worker comes here again
        part_register.data, part_register.is_frozen = dict(parts), False


@functools.cache
def _contents() -> list[tuple[Any, dict[str, Any]]]:
    registers = untouched_house()["register"].ALL_REGISTERS.values()
    return [(one, dict(one.data)) for one in registers]


def _take_out() -> dict[str, ModuleType]:
    taken, here = {}, f"{ROOT}{os.sep}"
    for name, module in sys.modules.copy().items():  # at once: other threads import
        file = getattr(module, "__file__", None) or ""
        if file.startswith(here):  # a Path of each of thousands would take a tenth of a run
            first = file.removeprefix(here).split(os.sep, 1)[0]
            if first.endswith(".py") or first in ("models", "options", "commands"):
                taken[name] = sys.modules.pop(name)
    return taken
