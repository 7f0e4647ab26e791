"""Save a run while it trains: copy to the host at once, write in the background.

At most one checkpoint is being written. Ranks agree over a process group of their own, so that
their training threads may talk at the same time. An error stops the run at the next step.
"""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.checkpoint.init import check_finite
from stageline.checkpoint.layout import BASE_FOLDER, discard, draft_name, file_facts, verify
from stageline.checkpoint.optimizer_state import (
    STATE_FILE,
    STATE_FOLDER,
    RowRange,
    StateShare,
    group_values,
    state_share,
)
from stageline.checkpoint.save import Files, WeightSaver, WeightShare, finish_draft, start_draft
from stageline.checkpoint.shards import HostCopies, gathered
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError, spelled
from stageline.progress import doing
from stageline.stage import Stage

_STEP = re.compile(r"step-(\d{8,})")
Skipped = tuple[Path, str]


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is called a checkpoint, and is whole then, the newest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)


def find_latest(folder: Path) -> tuple[Path | None, list[Skipped]]:
    """The newest checkpoint that verifies, and (path, reason) of each newer one.

    None in place of a path if none verifies: do not start from scratch if some were skipped.
    """
    skipped: list[Skipped] = []
    for _, path in step_folders(folder):
        try:
            verify(path)
            return path, skipped
        except (UserError, OSError) as error:
            skipped.append((path, str(error)))
    return None, skipped


def skip_lines(found: Path | None, skipped: Sequence[Skipped]) -> list[str]:
    """A line for each checkpoint that was skipped, with what is used in its place."""
    use = f"; {found.name} is used in its place" if found else ""
    return [f"checkpoint {path.name} is skipped{use}: {reason}" for path, reason in skipped]


def step_name(step: int) -> str:
    """The name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def replaced_name(folder: Path) -> str:
    """A fresh name for what is in the way and is not to be lost."""
    return draft_name(folder).replace(".tmp-", ".replaced-")


def keep_last(folder: Path, count: int) -> list[str]:
    """Remove all but the last `count` checkpoints; return the names of those that went."""
    removed = [path for _, path in reversed(step_folders(folder)[count:])]
    for path in removed:
        remove_checkpoint(path)
    return [path.name for path in removed]


def sweep(folder: Path) -> int:
    """Remove drafts that a killed run left; return how many bytes that freed."""
    freed = 0
    for path in folder.glob("*.tmp-*"):
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            freed += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
    return freed


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Rename checkpoints of later steps than `after`, and return what they are called now."""
    renamed = []
    for step, path in step_folders(folder):
        if step > after:
            target = folder / replaced_name(path)
            os.rename(path, target)
            renamed.append(target)
    return renamed


def remove_checkpoint(folder: Path) -> None:
    """Under another name first: what is called a checkpoint is whole at any time."""
    gone = folder.with_name(draft_name(folder))
    with contextlib.suppress(OSError):  # another process may have removed it
        os.rename(folder, gone)
    discard(gone)


class CheckpointWriter:
    """Writer of the checkpoints of a run; every rank makes one and calls the same methods.

    Args:
        folder: gets step-00000010 and the like.
        stages: of this rank, filled and wrapped; weights that replicas share out are gathered.
        parameters: what the optimizer updates, by name.
        rows: of parameters of which this rank holds a share.
        with_weights: save `parameters` to the bit, in addition to the weights in their own type.
        group: all ranks, over gloo, with no other use; None: there is one process.
        dp_rank: only the first replica writes what all of them have.
        keep: how many checkpoints stay; 0: all.
        waits: write before training continues; needs no copies.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stages: Sequence[Stage],
        processor: object | None,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        rows: Mapping[str, RowRange],
        with_weights: bool,
        group: dist.ProcessGroup | None = None,
        dp_rank: int = 0,
        keep: int = 0,
        waits: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stages, self.processor = list(stages), processor
        self.optimizer, self.parameters = optimizer, dict(parameters)
        self._begun = {} if optimizer is None else group_values(optimizer)
        self.rows = dict(rows)
        self.is_first = dp_rank == 0
        self.keep, self.waits = keep, waits
        self.ranks = Ranks.of(group)
        self.saver = WeightSaver(self.stages if self.is_first else [], ranks=self.ranks)
        self.with_weights = with_weights or self.saver.is_adapter
        # tied weights are on two ranks under one name, and their states are equal
        earlier = self.ranks.gather((dp_rank, list(self.parameters)))[: self.ranks.rank]
        self._left_out = {n for replica, names in earlier if replica == dp_rank for n in names}
        if self.saver.is_adapter and self.saver.base is None:
            self._save_base(self.folder.parent / BASE_FOLDER)
        self._copies = None if waits else HostCopies()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._said: list[str] = []

    def save(self, step: int, facts: Mapping[str, Any]) -> None:
        """Save the state after `step` optimizer steps, and what else the run needs to resume.

        Raises:
            StorageError, UserError: this or the checkpoint before could not be written.
        """
        self.finish()
        with doing("save"):
            with gathered(self.stages, keep=self.is_first):
                weights = self.saver.share(copies=self._copies)
            state = state_share(
                self.optimizer,
                self.parameters,
                begun=self._begun,
                rows=self.rows,
                left_out=self._left_out,
                is_first=self.is_first,
                with_weights=self.with_weights,
                copies=self._copies,
            )
            if self._copies is not None:
                self._copies.wait()  # training changes what they are copies of
        target = self.folder / step_name(step)
        if self.waits:
            self._write(target, step, weights, state, facts)
            return

        def write() -> None:
            try:
                self._write(target, step, weights, state, facts)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def news(self) -> list[str]:
        """Lines about what was saved since the last call; raise what went wrong."""
        self._raise_error()
        said, self._said = self._said, []
        return said

    def finish(self) -> None:
        """Wait until nothing is being written; raise what went wrong."""
        if self._thread is not None:
            with doing("checkpoint to be written", is_waiting=True):
                self._thread.join()
            self._thread = None
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _save_base(self, target: Path) -> None:
        """Save frozen weights that started at random, once for all checkpoints of the run."""
        if self.ranks.rank == 0 and target.exists():
            os.rename(target, target.with_name(replaced_name(target)))
        with gathered(self.stages, keep=self.is_first):
            draft = start_draft(target, self.ranks)
            known = self.saver.write_base(draft)
        facts: dict[str, object] = {"kind": BASE_FOLDER}
        finish_draft(draft, target, self.ranks, processor=self.processor, facts=facts, known=known)
        self.saver.base = str(target)

    def _write(
        self,
        target: Path,
        step: int,
        weights: WeightShare,
        state: StateShare,
        facts: Mapping[str, Any],
    ) -> None:
        draft = start_draft(target, self.ranks)

        def check() -> None:
            check_finite(
                [*weights.named_tensors(), *state.tensors.items()],
                what=f"weights and optimizer state after step {step}",
                cure="Nothing was saved: resume from the checkpoint before.",
            )

        self.ranks.together(check, draft)
        written, known = self.saver.write(weights, draft, target)
        known = {**known, **self._write_state(state, draft, {**facts, "step": step})}
        told = {**written, "step": step}
        finish_draft(draft, target, self.ranks, processor=self.processor, facts=told, known=known)
        if self.ranks.rank == 0:
            self._said.append(f"saved {target}")
            if self.keep and (removed := keep_last(self.folder, self.keep)):
                said = f"removed {', '.join(removed)} (`keep_last` {self.keep})"
                self._said.append(spelled(said))

    def _write_state(self, share: StateShare, draft: Path, facts: dict[str, Any]) -> Files:
        folder = draft / STATE_FOLDER
        path = folder / f"rank-{self.ranks.rank:05d}.safetensors"

        def write() -> tuple[dict, dict, Files, str | None]:
            folder.mkdir(exist_ok=True)
            index = share.write(path)
            name = path.relative_to(draft).as_posix()
            files = {name: file_facts(path)} if path.exists() else {}
            kind = None if self.optimizer is None else type(self.optimizer).__name__
            return index, share.extras, files, kind

        told = self.ranks.together(write, draft)

        def join() -> None:
            parameters: dict[str, dict[str, Any]] = {}  # with their pieces over all ranks
            for index, *_ in told:
                for name, entry in index.items():
                    mine = parameters.setdefault(name, {"shape": entry["shape"], "values": {}})
                    for key, piece in entry["values"].items():
                        mine["values"].setdefault(key, []).append(piece)
            saved = {
                "facts": facts,
                "optimizer": next((kind for *_, kind in told if kind), None),
                "extras": {n: more for _, extras, *_ in told for n, more in extras.items()},
                "parameters": parameters,
            }
            text = json.dumps(saved, indent=1, allow_nan=False)
            (folder / STATE_FILE).write_text(text + "\n")

        self.ranks.on_first(join, draft)
        return {name: facts for _, _, files, _ in told for name, facts in files.items()}
