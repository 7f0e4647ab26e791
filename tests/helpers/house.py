"""The parts and options of this repository, imported once and untouched, for forked entry files.

Tests fill and restore registers and replace parts, so an entry file that runs in a fork of a test's
process cannot use what that process has imported. To import it all again took a third of a run.
"""

import contextlib
import functools
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HERE = f"{ROOT}/"
# train_pp.py is made of these; it imports the second one when it has read its options
ENTRY_PARTS = ("commands.train", "commands.train_engines")
LATE = (  # a run imports these only after its start
    "torch.utils.tensorboard",
    "torch.profiler._cupti_monitor",
    "docstring_parser",
    "attr",
    "attrs",
    "datasets",
    "scipy.stats",
    "sklearn.datasets",
    "encodings.idna",
    "stageline.data.rows.converters",
    "stageline.data.rows.json_lines",
    "stageline.data.text.messages",
    "stageline.stages.causal_lm",
    "stageline.stages.vision_language",
)
COMMAND_LINE = (
    "--dataset jsonl --dataset-path . --model-path . --prompt question --prompt-fn fill "
    "--collate-fn sft --output-dir . --num-stages 2 --total-steps 1 --device cpu"
)

_LEFT: list[ModuleType | None] = []  # freeing what a fork does not use would copy its pages
_SEEN: list[str] = []  # all modules, when this process last was about to fork
_OURS: list[str] = []  # the modules of this repository among them


def prepare_house() -> None:
    """Prepare a fork, which would else copy the pages of thousands of modules."""
    untouched_house()
    if _SEEN != (names := list(sys.modules)):
        _SEEN[:], _OURS[:] = names, filter(_is_ours, names)


@functools.cache
def untouched_house() -> dict[str, ModuleType]:
    """Modules by name, with registers of their own; this process keeps those it had."""
    before = _take_out()
    sys.path.insert(0, str(ROOT))
    try:
        for name in ENTRY_PARTS:
            importlib.import_module(name)
        for name in LATE:
            with contextlib.suppress(ModuleNotFoundError):  # not every torch has each of them
                importlib.import_module(name)
        sys.modules["register"].import_shelf(*sys.modules["commands.train"].SHELF)
        # the first command line fills caches of patterns, functions' sources and options' fields
        sys.modules["parse_args"].parse_train_args(COMMAND_LINE.split())
        return _take_out()
    finally:
        sys.path.remove(str(ROOT))
        _take_out()
        sys.modules.update(before)


def enter_house() -> None:
    """Lets an entry file, in a process that was just forked, find the untouched modules."""
    for name in [*_OURS, *filter(_is_ours, newer_modules())]:
        _LEFT.append(sys.modules.pop(name, None))
    sys.path.insert(0, str(ROOT))
    sys.modules.update(untouched_house())
    for part_register, parts in _contents():  # a launcher's worker comes here again
        part_register.data, part_register.is_frozen = dict(parts), False


def newer_modules() -> list[str]:
    """Return names of what a forked process has imported, the last first."""
    return list(itertools.takewhile(lambda name: name != _SEEN[-1], reversed(sys.modules)))


@functools.cache
def _contents() -> list[tuple[Any, dict[str, Any]]]:
    registers = untouched_house()["register"].ALL_REGISTERS.values()
    return [(one, dict(one.data)) for one in registers]


def _take_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in filter(_is_ours, list(sys.modules))}


def _is_ours(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if not file.startswith(_HERE):
        return False
    first = file[len(_HERE) :].partition("/")[0]
    return first.endswith(".py") or first in ("models", "options", "commands")
