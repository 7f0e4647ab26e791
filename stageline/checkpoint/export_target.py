"""The place of an exported folder: what may be replaced, and how the new one takes its name."""

import ctypes
import os
import secrets
from pathlib import Path

from stageline import chaos
from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.files import ADAPTER_CONFIG, find_checkpoint
from stageline.checkpoint.layout import (
    discard,
    draft_name,
    fsync_path,
    publish,
    refuse_existing,
)
from stageline.errors import UserError

_CURRENT_FOLDER, _EXCHANGE = -100, 2  # of renameat2, linux/fcntl.h
MODEL_FILES = ("config.json", ADAPTER_CONFIG)


def find_source(path: str | Path) -> Path:
    """The folder that is exported, with links followed: `best` may move meanwhile.

    Raises:
        UserError: there is none, or it is no model or adapter folder.
    """
    source = find_checkpoint(path).resolve()
    if source.is_dir() and any((source / name).exists() for name in MODEL_FILES):
        return source
    held = sorted(item.name for item in (source / "checkpoints").glob("*"))
    what = f"it holds the checkpoints {', '.join(held)}: give one of them" if held else "give one"
    raise UserError(
        f"--model-path {path} has no {' or '.join(MODEL_FILES)}, the folder of a model or an "
        f"adapter was expected, because weights alone do not say what computes with them; {what}."
    )


def check_target(source: Path, target: Path, *, overwrites: bool) -> None:
    """Refuses a target that is there, unless it may be replaced and is a model folder.

    Raises:
        UserError: it is there, or holds what is exported.
    """
    if not overwrites or not target.exists():
        refuse_existing(target)
        return
    kept = [source, *([find_base(source)] if (source / ADAPTER_CONFIG).exists() else [])]
    held = [path for path in kept if path.resolve().is_relative_to(target.resolve())]
    if held:
        raise UserError(
            f"--overwrite came with --output-path {target}, in which {held[0]} lies, which is "
            "needed: another folder was expected, since this one is removed. Choose another."
        )
    is_model = any((target / name).is_file() for name in MODEL_FILES)
    if target.is_symlink() or not is_model:
        raise UserError(
            f"--overwrite came with --output-path {target}, which is no model folder: one with "
            f"{' or '.join(MODEL_FILES)} was expected, since all in it is removed. Choose "
            "another folder."
        )


def publish_over(draft: Path, target: Path, *, facts: dict[str, object]) -> None:
    """Gives the draft its name; an old folder of that name goes when the new one is in place."""
    if not target.exists():
        publish(draft, target, facts=facts, known={})
        return
    ready = target.with_name(draft_name(target))
    try:
        publish(draft, ready, facts=facts, known={})
        chaos.point("file")
        old = ready if _exchange(ready, target) else _rename_in_turn(ready, target)
    except BaseException:
        discard(ready)
        raise
    fsync_path(target.parent)  # before the old one goes
    discard(old)


def _exchange(one: Path, other: Path) -> bool:
    """Two folders swap their names in one step, where the system can do that (Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return rename(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE) == 0


def _rename_in_turn(ready: Path, target: Path) -> Path:
    """Renames the old folder away and the new one in; where the old one is then."""
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    target.rename(old)
    try:
        chaos.point("file")
        ready.rename(target)
    except BaseException:
        old.rename(target)
        raise
    return old
