"""The checkpoint that a run continues, whether it is of the same run, and the run folder's lock."""

import fcntl
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.layout import read_manifest, verify
from stageline.checkpoint.optimizer_state import SavedState
from stageline.checkpoint.writer import find_latest, skip_lines, step_folders, sweep
from stageline.distributed.ranks import Ranks
from stageline.distributed.terminal import terminal
from stageline.errors import CheckpointError, UserError, spelled

AUTO = "auto"


@dataclass(frozen=True)
class ResumePoint:
    """A whole checkpoint with a training state."""

    folder: Path
    state: SavedState
    base: str | None  # the frozen model of an adapter checkpoint

    @property
    def step(self) -> int:
        """Return the optimizer steps done."""
        return int(self.state.facts["step"])


def find_resume_point(wanted: str | None, checkpoints: Path, *, ranks: Ranks) -> ResumePoint | None:
    """Return the checkpoint that `resume` ("auto", a path, None) means; None for a new run.

    Raises:
        UserError: there are checkpoints and `resume` is not given.
        CheckpointError: none of them is complete, or the one asked for is not.
    """

    def find() -> tuple[str, str | None] | None:
        if wanted is None:
            if there := step_folders(checkpoints):
                raise UserError(
                    f"{checkpoints} holds {len(there)} checkpoints of an earlier run, up to "
                    f"{there[0][1].name}. Continue that run with `resume` auto, or choose another "
                    "`output_dir`."
                )
            return None
        if wanted == AUTO:
            folder, skipped = find_latest(checkpoints)
            for line in skip_lines(folder, skipped):
                terminal.say(line)
            if folder is None and skipped:
                reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in skipped)
                raise CheckpointError(
                    f"none of the {len(skipped)} checkpoints in {checkpoints} is whole. Give a "
                    "checkpoint from elsewhere by its path, or choose another `output_dir` to "
                    f"start again.\n{reasons}"
                )
            if folder is None:
                none_yet = f"no checkpoint in {checkpoints} yet, training starts at step 0"
                terminal.say(spelled(f"`resume` auto: {none_yet}"))
                return None
        else:
            folder = Path(wanted).expanduser().absolute()
            if not folder.is_dir():
                raise UserError(
                    f"`resume` {wanted} is not a folder. Give a checkpoint "
                    "(.../checkpoints/step-00000010), or auto for the newest one of `output_dir`."
                )
            verify(folder)
        manifest = read_manifest(folder)
        is_own = manifest.get("base_sha256") is not None  # else a model that was there before
        return str(folder), str(find_base(folder)) if is_own else manifest.get("base")

    found = ranks.together(lambda: find() if ranks.rank == 0 else None)[0]
    if found is None:
        return None
    folder, base = found
    return ResumePoint(Path(folder), SavedState(Path(folder)), base)


def check_same_run(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    may_change: Callable[[str], bool],
    allows_changes: bool,
    say: Callable[[str], None],
    why: str = "",
) -> None:
    """Refuse to resume a run with other settings; all differences are listed.

    Args:
        saved, current: option -> value as the config file has it, and other facts.
        may_change: whether an option has no effect on the course of training.
        allows_changes: only print the differences.
        why: more of the reason, for the error.
    """
    differences = [
        f"{name}: {saved.get(name)!r} then, {current.get(name)!r} now"
        for name in sorted({*saved, *current})
        if not may_change(name) and saved.get(name) != current.get(name)
    ]
    if not differences:
        return
    listed = "\n".join(f"  {line}" for line in differences)
    if allows_changes:
        say(f"resumed with other options, so results differ from the first run's:\n{listed}")
        return
    raise CheckpointError(
        f"options differ from the checkpoint's run ({len(differences)}). Use its values, or add "
        f"`allow_changes`.{why}\n{listed}"
    )


LOCK_FILE = "run.lock"
_held: list[IO[str]] = []  # until the process ends: the kernel lets go of them, whatever happens
# data workers outlive a killed rank by seconds
os.register_at_fork(after_in_child=lambda: [file.close() for file in _held])


def claim_run_folder(folder: Path) -> None:
    """Make the folder, lock it, and remove what a killed run left half-written."""
    try:
        os.makedirs(folder, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"`output_dir` {folder} cannot be written ({error.strerror}). Choose another one."
        ) from error
    try:
        # only this process has the lock: workers, which may outlive it, do not inherit this kind
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        raise UserError(
            f"`output_dir` {folder} is in use by process {file.read() or '?'}. Wait for that run, "
            "end it, or choose another `output_dir`."
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held.append(file)
    if freed := sweep(folder / "checkpoints"):
        terminal.say(f"removed checkpoints that were half written: {freed:,} bytes freed")


def is_claimed(folder: Path) -> bool:
    """Whether a run is using this folder now."""
    try:
        with (folder / LOCK_FILE).open(encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False
