"""Ranks that write one folder: they gather plain values, and fail together or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from stageline import progress
from stageline.checkpoint.layout import discard
from stageline.errors import UserError

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
            UserError, OSError: a rank failed; every rank raises, and the draft is removed.
        """
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        told = self.gather((result, error is None, isinstance(error, UserError), str(error)))
        failed = [(rank, *told[rank][2:]) for rank in range(self.size) if not told[rank][1]]
        if not failed:
            return [value for value, *_ in told]
        rank, is_user_error, text = failed[0]
        if draft is not None:
            text = text if is_user_error else f"saving to {draft} failed on rank {rank}: {text}"
            if self.rank == 0:
                discard(draft)
        raise (UserError if is_user_error else OSError)(text) from error
