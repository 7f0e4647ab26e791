"""Keeps the weights of the best evaluation of a run, under a name that stays.

`best` is a link to the folder `best-step-00000123` beside it: a link is exchanged in one step, a
folder is not. So whenever a run is killed, `best` leads to a whole checkpoint, the old or the new.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist

from stageline.checkpoint.layout import draft_name, fsync_path, read_manifest
from stageline.checkpoint.retention import remove_checkpoint
from stageline.checkpoint.together import Ranks
from stageline.errors import UserError
from stageline.training.evaluation import EvalResult

LINK = "best"
Metric = Literal["none", "loss", "token_accuracy"]
Result = TypeVar("Result")


class BestCheckpoint:
    """Decides which evaluation is the best so far, and keeps the weights of that one alone.

    Every rank calls the same methods with the same results. A run that is continued goes on from
    the best it had; a new run in the folder of another one leaves that one's best where it is, and
    moves the link only.

    Args:
        folder: of the run's checkpoints.
        metric: what is compared: the lowest loss or the highest accuracy; "none" keeps nothing.
        save: saves the weights as a new folder, `save(path, step=..., facts=...)`, on all ranks.
        group: ranks that agree; None: all.
        start_step: steps done before; 0 for a new run.

    Raises:
        UserError: something else is called "best", or what it leads to is not whole.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metric: Metric,
        save: Callable[..., object],
        group: dist.ProcessGroup | None = None,
        start_step: int = 0,
    ) -> None:
        self.folder = folder
        self.metric = metric
        self.save = save
        self.ranks = Ranks.of(group)
        self.value: float | None = None
        self.step: int | None = None
        self._kept: str | None = None  # name of the folder that this run may remove
        if metric != "none":
            self._look(is_continued=start_step > 0)

    @property
    def link(self) -> Path:
        """What leads to the best checkpoint; not there before the first one."""
        return self.folder / LINK

    def improves(self, result: EvalResult) -> bool:
        """Whether it is better than all before; equal is not, nor is what is not a number."""
        if self.metric == "none" or result.num_targets == 0:
            return False
        value = getattr(result, self.metric)
        if value is None or not math.isfinite(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.metric == "loss" else value > self.value

    def keep(self, step: int, result: EvalResult) -> str:
        """Saves the weights as the new best, then removes the old ones; says so in a line."""
        name = self.ranks.gather(self._free_name(step))[0]
        figures = {
            "loss": result.loss,
            "token_accuracy": result.token_accuracy,
            "num_targets": result.num_targets,
        }
        facts = {"best": {"metric": self.metric, "step": step, "figures": figures}}
        self.save(self.folder / name, step=step, facts=facts)
        self._on_main(lambda: self._exchange(name, old=self._kept))
        self.value, self.step, self._kept = getattr(result, self.metric), step, name
        return f"best {self.metric} so far, {self.value:.4f} at step {step}: saved {self.link}"

    def _look(self, *, is_continued: bool) -> None:
        """Goes on from the best of a run that is continued; all ranks from the same."""
        found = self._on_main(lambda: self._read(is_continued=is_continued))
        if found is not None:
            self.value, self.step, self._kept = found

    def _read(self, *, is_continued: bool) -> tuple[float, int, str] | None:
        if self.link.exists() and not self.link.is_symlink():
            raise UserError(
                f"{self.link} is there and is no link, a link to the best checkpoint was expected: "
                "--save-best moves it to each new one. Rename that folder or choose another "
                "--output-dir."
            )
        if not is_continued or not self.link.exists():
            return None
        facts = read_manifest(self.link).get("best")
        if not isinstance(facts, dict):
            return None  # another program's: its figures are not known
        # all figures are there: the run may be continued with another metric
        return facts["figures"][self.metric], facts["step"], os.readlink(self.link)

    def _free_name(self, step: int) -> str:
        """A run that was killed, or an earlier run, may have left a folder of this step."""
        name = f"{LINK}-step-{step:08d}"
        names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
        return next(name for name in names if not (self.folder / name).exists())

    def _exchange(self, name: str, *, old: str | None) -> None:
        temporary = self.folder / draft_name(self.link)
        os.symlink(name, temporary, target_is_directory=True)
        os.replace(temporary, self.link)
        fsync_path(self.folder)  # before the old one goes
        if old is not None and old != name:
            remove_checkpoint(self.folder / old)

    def _on_main(self, function: Callable[[], Result]) -> Result | None:
        """What `function` returns on the main rank; where it fails, all ranks raise."""
        nothing = self.folder / draft_name(self.link)  # there is no draft to remove
        return self.ranks.together(lambda: function() if self.ranks.rank == 0 else None, nothing)[0]
