"""The errors that end a run, and the exit code of each kind. Not for our own mistakes: assertions.

A message has four parts: what came, what was expected, why, what to do. An entry file prints it
without a traceback and ends with `exit_code`; `kind` is the word in brackets of its first line.

Codes: 0 done, 2 usage, 3 data, 4 checkpoint, 5 storage, 6 non-finite, 7 memory, 8 hang, 9 crash,
10 remote, 16 and 17 a step that cannot be reproduced (transient, or other bits each time), 130
interrupted (Ctrl-C), 143 preempted and saved.
"""

CRASH = 9
INTERRUPTED = 130
PREEMPTED = 143


class UserError(ValueError):
    """A wrong option, key, path or combination of them."""

    exit_code = 2
    kind = "usage"


class ContractError(UserError):
    """A part that does not keep what its register asks; the message names part, file and line."""

    kind = "contract"


class PlanError(UserError):
    """A model that the planner cannot take to pieces; it may train all the same."""


class DataError(UserError):
    """A row or an image that cannot be used; the message names file and line."""

    exit_code = 3
    kind = "data"


class CheckpointError(UserError):
    """A checkpoint or model file that is damaged, incomplete, or of another model."""

    exit_code = 4
    kind = "checkpoint"


class StorageError(OSError):
    """Something could not be written; what was saved before is as it was."""

    exit_code = 5
    kind = "storage"


class NonFiniteError(ArithmeticError):
    """Losses, gradients or weights that are inf or nan."""

    exit_code = 6
    kind = "non-finite"


class RemoteError(RuntimeError):
    """A model elsewhere does not answer, or refuses; answers that came are kept."""

    exit_code = 10
    kind = "remote"


class MemoryFull(RuntimeError):
    """A device or the host has no memory left."""

    exit_code = 7
    kind = "memory"


class HangError(RuntimeError):
    """A rank made no progress for longer than allowed."""

    exit_code = 8
    kind = "hang"


class NotReproducible(ArithmeticError):
    """A step gave other bits when it was run again, and the old or the new ones a third time."""

    exit_code = 16
    kind = "not-reproducible"


class ResultRejected(NotReproducible):
    """A step gave other bits each time it was run."""

    exit_code = 17
    kind = "rejected"
