"""The place of an exported folder: what may be replaced, and how the new one takes its name."""

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
    ready, old = (target.with_name(draft_name(target)) for _ in range(2))
    try:
        publish(draft, ready, facts=facts, known={})
        chaos.point("file")
        target.rename(old)
    except BaseException:
        discard(ready)
        raise
    try:
        chaos.point("file")
        ready.rename(target)
    except BaseException:
        old.rename(target)
        discard(ready)
        raise
    fsync_path(target.parent)  # before the old one goes
    discard(old)
