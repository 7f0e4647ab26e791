"""The errors that end a run, and the exit code of each kind. Not for our own mistakes: assertions.

A message says what is wrong, with the value, and what to do. An entry file prints it without a
traceback and ends with `exit_code`; `kind` is the word in brackets of its first line.

Codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 storage, 6 non-finite, 7 memory, 8 hang, 9 crash,
10 remote, 130 interrupted (Ctrl-C), 143 preempted and saved.
"""

import errno
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

CRASH, INTERRUPTED, PREEMPTED = 9, 130, 143
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)((?:\.[a-z0-9_]+)?)`")
_option_names: Callable[[], Mapping[str, str]] = dict


def name_options(names: Callable[[], Mapping[str, str]]) -> None:
    """Set the names of the options of the running command, argument -> option as it is typed.

    The engine has no options: its messages contain `num_stages`, the name of an argument, and
    `dataset.val_size` for an option of a component.
    """
    global _option_names
    _option_names = names


def spelled(text: str) -> str:
    """Return a message with options as they are typed on the command line."""
    names = _option_names() if "`" in text else {}

    def spell(match: re.Match) -> str:
        name, rest = match.groups()
        return names.get(name + rest) or (names[name] + rest if name in names else match.group())

    return _FIELD.sub(spell, text)


class _Spelled:
    """An error whose text names options as the command line does."""

    def __str__(self) -> str:
        return spelled(super().__str__())


class UserError(_Spelled, ValueError):
    """A wrong option, key, path or combination of them."""

    exit_code, kind = 2, "usage"


class ContractError(UserError):
    """A part that does not keep what its register asks; the message names part, file and line."""

    kind = "contract"


class PlanError(UserError):
    """A model that the planner cannot take to pieces; it may train all the same."""


class DataError(UserError):
    """A row or an image that cannot be used; the message names file and line."""

    exit_code, kind = 3, "data"


class CheckpointError(UserError):
    """A checkpoint or model file that is damaged, incomplete, or of another model."""

    exit_code, kind = 4, "checkpoint"


class StorageError(_Spelled, OSError):
    """Something could not be written; what was saved before is as it was."""

    exit_code, kind = 5, "storage"


class NonFiniteError(_Spelled, ArithmeticError):
    """Losses, gradients or weights that are inf or nan."""

    exit_code, kind = 6, "non-finite"


class RemoteError(_Spelled, RuntimeError):
    """A model elsewhere does not answer, or refuses; answers that came are kept."""

    exit_code, kind = 10, "remote"


class MemoryFull(_Spelled, RuntimeError):
    """A device or the host has no memory left."""

    exit_code, kind = 7, "memory"


class HangError(_Spelled, RuntimeError):
    """A rank made no progress for longer than allowed."""

    exit_code, kind = 8, "hang"


def package(module: str, user: str, *, instead: str, pip: str = "", extra: str = "") -> Any:
    """Import an optional package.

    Args:
        user: what needs it, the first words of the error.
        instead: what does without it, the last words of the error.
        pip: how pip calls it, if not by its module.
        extra: what scripts/setup.sh calls it.

    Raises:
        UserError: it is not installed, or does not work here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = f"pip install {pip or module}"
        how = f"bash scripts/setup.sh {extra}, or {how}" if extra else how
        raise UserError(
            f"{user} needs the package {module}, which cannot be imported ({error}). Run {how}, "
            f"or {instead}."
        ) from error


_NO_MEMORY = re.compile("(?i)out of memory|t allocate memory|enough memory|bad_alloc|ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host ran out of memory, by type or by torch's message."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
