"""Which checkpoints of a run stay: the last ones; what a crash left goes, what is replaced is kept.

Nothing is deleted under its own name: a folder that is called step-... is whole at any time.
"""

import contextlib
import os
import shutil
from pathlib import Path

from stageline import chaos
from stageline.checkpoint.find import step_folders
from stageline.checkpoint.layout import discard, draft_name


def step_name(step: int) -> str:
    """The name of the checkpoint after so many optimizer steps."""
    return f"step-{step:08d}"


def replaced_name(folder: Path) -> str:
    """A fresh name for what is in the way and is not to be lost."""
    return draft_name(folder).replace(".tmp-", ".replaced-")


def keep_last(folder: Path, count: int) -> list[str]:
    """Removes all but the last `count` checkpoints; call it when the newest has verified.

    Returns:
        Names of those that went.
    """
    chaos.point("retention")
    removed = []
    for _, path in reversed(step_folders(folder)[count:]):
        remove_checkpoint(path)
        removed.append(path.name)
    return removed


def sweep(folder: Path) -> int:
    """Removes drafts that a killed run left; returns how many bytes that freed."""
    freed = 0
    for path in folder.glob("*.tmp-*"):
        if path.is_symlink() or path.is_file():
            path.unlink()
            continue
        freed += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    return freed


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Renames checkpoints of later steps than `after`: the run will come by there again.

    Returns:
        What they are called now.
    """
    renamed = []
    for step, path in step_folders(folder):
        if step > after:
            target = folder / replaced_name(path)
            os.rename(path, target)
            renamed.append(target)
    return renamed


def remove_checkpoint(folder: Path) -> None:
    """Under another name first: what is called a checkpoint is whole at any time."""
    chaos.point("file")
    gone = folder.with_name(draft_name(folder))
    with contextlib.suppress(OSError):  # somebody else may have removed it
        os.rename(folder, gone)
    discard(gone)
