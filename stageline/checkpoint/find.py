"""Finds the newest checkpoint of a run that is whole, and says why newer ones are not."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from stageline.checkpoint.layout import verify as verify_files
from stageline.errors import CheckpointError, UserError

_STEP = re.compile(r"step-(\d{8,})")
Skipped = tuple[Path, str]


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is called a checkpoint, the newest first.

    By number and not by time of change: clocks go backwards, and copies are new. Drafts
    (`step-00000200.tmp-1a2b3c4d`) are not called so.
    """
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)


def find_latest(
    folder: Path, *, verify: Callable[[Path], object] = verify_files
) -> tuple[Path | None, list[Skipped]]:
    """The newest checkpoint that verifies, and (path, reason) of each newer one.

    Args:
        verify: raises `UserError` or `OSError` for a folder that is not whole.

    Returns:
        None in place of a path if none verifies. The caller must not start from scratch then,
        unless nothing was skipped.
    """
    skipped: list[Skipped] = []
    for _, path in step_folders(folder):
        try:
            verify(path)
        except (UserError, OSError) as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped


def skip_lines(found: Path | None, skipped: Sequence[Skipped]) -> list[str]:
    """A line for each checkpoint that was skipped, with what is used in its place."""
    use = f"; {found.name} is used in its place" if found else ""
    return [f"checkpoint {path.name} is skipped{use}: {reason}" for path, reason in skipped]


def no_checkpoint_left(skipped: Sequence[Skipped]) -> CheckpointError:
    """The error for a run whose checkpoints are all damaged."""
    assert skipped, "a run without checkpoints starts from scratch"
    folder = skipped[0][0].parent
    reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in skipped)
    return CheckpointError(
        f"none of the {len(skipped)} checkpoints in {folder} is whole, one was expected: a run "
        "never starts from scratch in silence, where there was something to continue. Give a "
        "checkpoint from elsewhere by its path, or choose another --output-dir to start anew.\n"
        f"{reasons}"
    )
