"""The loop over optimizer steps: draws batches, steps, logs, evaluates, saves, stops.

Knows neither files nor bars: what happens beside a step is given as callables.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from stageline import chaos, progress
from stageline.checkpoint.layout import Ranks, draft_name, fsync_path, read_manifest
from stageline.checkpoint.writer import remove_checkpoint
from stageline.errors import UserError, spelled
from stageline.pipeline.runner import MicroBatch
from stageline.training.evaluation import EvalResult
from stageline.training.step import StepResult, TrainStep


def train(
    train_step: TrainStep,
    batches: Iterator[Sequence[MicroBatch]],
    *,
    total_steps: int,
    start_step: int = 0,
    eval_steps: int = 0,
    save_steps: int = 0,
    on_step: Callable[[int, StepResult, float], None],
    evaluate: Callable[[int], bool] | None,
    save: Callable[[int], None],
    stop_requested: Callable[[], bool],
) -> bool:
    """Trains from `start_step` to `total_steps`.

    Args:
        batches: yields, for each step, the list of micro-batches.
        start_step: the first step to run: 0, or where a checkpoint left off.
        eval_steps, save_steps: evaluate / save after every so many steps, and after the last; 0:
            after the last alone.
        on_step: called after each step with (steps done, result, seconds).
        evaluate: called with the number of steps done; before the first step too. Returns whether
            training is to end here.
        save: called with the number of steps done.
        stop_requested: whether this rank was asked to stop; ranks agree at the end of a step.

    Returns:
        False when it was asked to stop before the last step; the weights are saved then too, as
        they are where an evaluation ended it, which is an end like any other.

    Raises:
        NonFiniteError: too many steps in a row were skipped.
    """
    if evaluate is not None and start_step == 0:
        evaluate(0)
    progress.at_step(start_step)
    for step in range(start_step, total_steps):
        start = time.perf_counter()
        with progress.doing("data"):
            chaos.point("data")
            micro_batches = next(batches)
        result = train_step(
            micro_batches,
            step=step,
            stop_requested=stop_requested,
            data_wait=time.perf_counter() - start,
        )
        done = step + 1
        progress.at_step(done)
        on_step(done, result, time.perf_counter() - start)
        train_step.skips.check(result.problem, step=done)
        is_end = done == total_steps
        is_saved = _is_due(done, save_steps, is_end or result.wants_stop)
        if is_saved:
            save(done)
        if result.wants_stop and not is_end:  # it may be in a hurry
            return False
        if evaluate is not None and _is_due(done, eval_steps, is_end) and evaluate(done):
            if not is_saved:
                save(done)
            return True
    return True


def _is_due(done: int, interval: int, is_end: bool) -> bool:
    return is_end or (interval > 0 and done % interval == 0)


FALLING = ("loss", "perplexity")  # figures with such a word are better when lower


def figure_of(result: EvalResult, name: str) -> float:
    """A held-out figure by its name in the log.

    Raises:
        UserError: the evaluation has none of that name.
    """
    figures = result.named()
    if name not in figures:
        raise UserError(
            f"the held-out figure {name!r} was asked for, and an evaluation of this run has "
            f"{', '.join(figures)}. One of these was expected, because the best weights and early "
            "stopping go by it: name it with `save_best` or `early_stop_metric`."
        )
    return figures[name]


def is_better(value: float, best: float, *, metric: str, by: float = 0.0) -> bool:
    """Whether a figure beats the best so far by more than `by`; what is not a number never does."""
    if not math.isfinite(value):
        return False
    lower = any(word in metric for word in FALLING)
    return value < best - by if lower else value > best + by


LINK = "best"
Result = TypeVar("Result")


class BestCheckpoint:
    """Decides which evaluation is the best so far, and keeps the weights of that one alone.

    `best` is a link to the folder `best-step-00000123` beside it: a link is exchanged in one step,
    a folder is not. Whenever a run is killed, `best` leads to a whole checkpoint, old or new.

    Every rank calls the same methods with the same results. A run that is continued goes on from
    the best it had; a new run in the folder of another one leaves that one's best where it is, and
    moves the link only.

    Args:
        folder: of the run's checkpoints.
        metric: name of the held-out figure that is compared; "none" keeps nothing.
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
        metric: str,
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
        value = figure_of(result, self.metric)
        if self.value is None:
            return math.isfinite(value)
        return is_better(value, self.value, metric=self.metric)

    def keep(self, step: int, result: EvalResult) -> str:
        """Saves the weights as the new best, then removes the old ones; says so in a line."""
        name = self.ranks.gather(self._free_name(step))[0]
        figures = {**result.named(), "num_targets": result.num_targets}
        facts = {"best": {"metric": self.metric, "step": step, "figures": figures}}
        self.save(self.folder / name, step=step, facts=facts)
        self._on_main(lambda: self._exchange(name, old=self._kept))
        self.value, self.step, self._kept = figure_of(result, self.metric), step, name
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
                "`save_best` moves it to each new one. Rename that folder or choose another "
                "`output_dir`."
            )
        if not is_continued or not self.link.exists():
            return None
        facts = read_manifest(self.link).get("best")
        if not isinstance(facts, dict):
            return None  # another program's: its figures are not known
        # all figures are there: the run may be continued with another metric
        value = facts["figures"].get(self.metric)
        return None if value is None else (value, facts["step"], os.readlink(self.link))

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


class EarlyStop:
    """Counts evaluations without improvement; the same on all ranks, as the figures are.

    Args:
        patience: so many in a row end the run; 0: never.
        metric: name of the figure in the log.
        delta: an improvement is more than this.
    """

    def __init__(self, patience: int, *, metric: str = "loss", delta: float = 0.0) -> None:
        self.patience = patience
        self.metric = metric
        self.delta = delta
        self.best: float | None = None
        self.best_step = 0
        self.count = 0

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return 0 < self.patience <= self.count

    def see(self, step: int, value: float) -> None:
        """Takes the figure of one evaluation."""
        if self.best is None or is_better(value, self.best, metric=self.metric, by=self.delta):
            if math.isfinite(value):
                self.best, self.best_step, self.count = value, step, 0
                return
        self.count += 1

    def see_log(self, records: Iterable[Mapping[str, Any]], *, until: int) -> None:
        """Takes the evaluations of a run that is continued, from the records of its log.

        Args:
            until: the step from which the run goes on; what was logged later is not looked at.
        """
        by_step = {
            record["step"]: record.get(self.metric)
            for record in records
            if record.get("kind") == "eval" and record["step"] <= until
        }
        for step, value in sorted(by_step.items()):
            self.see(step, math.nan if value is None else float(value))

    def __str__(self) -> str:
        best = "none" if self.best is None else f"{self.best:.4f} at step {self.best_step}"
        return spelled(
            f"{self.count} evaluations without a better {self.metric} (best: {best}): the run ends "
            "here (`early_stop`)"
        )
