"""Ranks that write one folder: they gather plain values, and fail together or not at all."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from stageline import progress
from stageline.checkpoint.layout import discard
from stageline.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    StorageError,
    UserError,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """The ranks that save together: those of one pipeline, or this process alone."""

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
        """What every rank gave, by rank."""
        if self.size == 1:
            return [value]
        values: list[Result] = [value] * self.size
        with progress.doing("the ranks that save", is_waiting=True):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, function: Callable[[], Result], draft: Path | None = None) -> list[Result]:
        """Runs a part of the work on every rank; what each returned.

        Args:
            draft: a folder to remove if a rank fails; the message names it.

        Raises:
            UserError, StorageError, RuntimeError: a rank failed; every rank raises the same, and
                the draft is removed.
        """
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        told = self.gather((result, None if error is None else Told.of(error, draft)))
        failed = [(rank, said) for rank, (_, said) in enumerate(told) if said is not None]
        if not failed:
            return [value for value, _ in told]
        if draft is not None and self.rank == 0:
            discard(draft)
        rank, said = failed[0]
        raise said.as_error(rank, draft) from error


@dataclass(frozen=True)
class Told:
    """An error in words that travel to other ranks.

    Attributes:
        kind: name of the class that every rank raises.
        space: what the disk had to say, if it was the disk.
    """

    kind: str
    text: str
    space: str = ""

    @classmethod
    def of(cls, error: Exception, draft: Path | None) -> "Told":
        """Tells what went wrong on this rank."""
        if isinstance(error, UserError | NonFiniteError):
            return cls(type(error).__name__, str(error))
        if isinstance(error, OSError | SafetensorError):
            return cls("StorageError", str(error), "" if draft is None else _space(draft))
        return cls("RuntimeError", f"{type(error).__name__}: {error}")

    def as_error(self, rank: int, draft: Path | None) -> Exception:
        """The error that every rank raises."""
        if self.kind in _PASSED_ON:
            return _PASSED_ON[self.kind](self.text)
        what = "" if draft is None else f"saving to {draft} failed on "
        text = f"{what}rank {rank}: {self.text}{self.space}"
        if self.kind != "StorageError":
            return RuntimeError(text)
        return StorageError(f"{text}. What was saved before is as it was. Make room, then resume.")


_PASSED_ON: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UserError, DataError, CheckpointError, NonFiniteError)
}


def _space(draft: Path) -> str:
    """Bytes written of a draft, and bytes free where it lies."""
    written = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
    try:
        free = f"{shutil.disk_usage(draft.parent).free:,}"
    except OSError:
        free = "unknown"  # the folder itself is gone
    return f" ({written:,} bytes of it were written, {free} bytes are free)"
