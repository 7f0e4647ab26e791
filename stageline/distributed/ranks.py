"""Run a part of the work on all ranks of a process group: they fail together or not at all."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist
from safetensors import SafetensorError

from stageline import progress
from stageline.errors import CheckpointError, DataError, NonFiniteError, StorageError, UserError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group, or only this process."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Ranks":
        """The ranks of `group`; without a process group, this process."""
        if not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all ranks, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Result] = [value] * self.size
        with progress.doing("the ranks that save", is_waiting=True):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, function: Callable[[], Result], draft: Path | None = None) -> list[Result]:
        """Run a part of the work on every rank; what each returned.

        Raises:
            UserError, StorageError, RuntimeError: a rank failed; every rank raises the same, and
                the draft, if one is given, is removed.
        """
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        told = self.gather((result, None if error is None else self._in_words(error, draft)))
        failed = [said for _, said in told if said is not None]
        if not failed:
            return cast("list[Result]", [value for value, _ in told])  # each rank has one
        if draft is not None and self.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        kind, text = failed[0]
        raise _TRAVELLING[kind](text) from error

    def _in_words(self, error: Exception, draft: Path | None) -> tuple[str, str]:
        """The kind and the text of an error, which travel to other ranks."""
        for kind in _PASSED_ON:
            if isinstance(error, kind):
                return kind.__name__, str(error)
        where = "" if draft is None else f"saving to {draft} failed on "
        place = f"{where}rank {self.rank}"
        if not isinstance(error, OSError | SafetensorError):
            return "RuntimeError", f"{place}: {type(error).__name__}: {error}"
        space = ""
        with contextlib.suppress(OSError):  # the folder itself is gone
            space = f" ({shutil.disk_usage(draft.parent).free:,} bytes are free)" if draft else ""
        cure = "What was saved before is as it was. Make room, then resume."
        return "StorageError", f"{place}: {error}{space}. {cure}"

    def on_first(self, function: Callable[[], Result], draft: Path | None = None) -> Result | None:
        """Call `function` on rank 0 only, as `together` does, and return its result there."""
        return self.together(lambda: function() if self.rank == 0 else None, draft)[0]


# the most special kinds first
_PASSED_ON: list[type[Exception]] = [DataError, CheckpointError, UserError, NonFiniteError]
_TRAVELLING: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (*_PASSED_ON, StorageError, RuntimeError)
}
