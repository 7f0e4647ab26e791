"""The loop over optimizer steps: draws batches, steps, logs, evaluates, saves, stops.

Knows neither files nor bars: what happens beside a step is given as callables.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stageline import chaos, progress
from stageline.pipeline.runner import MicroBatch
from stageline.training.step import StepResult, TrainStep


@dataclass(frozen=True)
class TrainOptions:
    """When things happen, in optimizer steps; 0 for an interval means never.

    Attributes:
        total_steps: where training ends.
        eval_steps, save_steps: evaluate / save after every so many steps, and after the last.
        start_step: the first step to run: 0, or where a checkpoint left off.
    """

    total_steps: int
    eval_steps: int = 0
    save_steps: int = 0
    start_step: int = 0


class Trainer:
    """Trains from `start_step` to `total_steps`.

    Args:
        train_step: runs one optimizer step.
        batches: yields, for each step, the list of micro-batches.
        on_step: called after each step with (steps done, result, seconds).
        evaluate: called with the number of steps done; before the first step too. Returns whether
            training is to end here.
        save: called with the number of steps done.
        stop_requested: whether this rank was asked to stop; ranks agree at the end of a step.
    """

    def __init__(
        self,
        train_step: TrainStep,
        *,
        batches: Iterator[Sequence[MicroBatch]],
        options: TrainOptions,
        on_step: Callable[[int, StepResult, float], None],
        evaluate: Callable[[int], bool | None] | None = None,
        save: Callable[[int], None] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.train_step = train_step
        self.batches = batches
        self.options = options
        self.on_step = on_step
        self.evaluate = evaluate
        self.save = save
        self.stop_requested = stop_requested

    def run(self) -> bool:
        """Runs all steps.

        Returns:
            False when it was asked to stop before the last step; the weights are saved then too,
            as they are where an evaluation ended it, which is an end like any other.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        options = self.options
        if self.evaluate is not None and options.start_step == 0:
            self.evaluate(0)
        progress.at_step(options.start_step)
        for step in range(options.start_step, options.total_steps):
            start = time.perf_counter()
            with progress.doing("data"):
                chaos.point("data")
                micro_batches = next(self.batches)
            result = self.train_step(
                micro_batches,
                step=step,
                stop_requested=self.stop_requested,
                data_wait=time.perf_counter() - start,
            )
            done = step + 1
            progress.at_step(done)
            self.on_step(done, result, time.perf_counter() - start)
            self.train_step.skips.check(result.problem, step=done)
            is_end = done == options.total_steps or result.wants_stop
            is_saved = self.save is not None and _is_due(done, options.save_steps, is_end)
            if is_saved:
                self.save(done)
            is_stopped = result.wants_stop and done < options.total_steps  # it may be in a hurry
            if (
                self.evaluate is not None
                and not is_stopped
                and _is_due(done, options.eval_steps, done == options.total_steps)
            ):
                if self.evaluate(done):
                    if self.save is not None and not is_saved:
                        self.save(done)
                    return True
            if result.wants_stop:
                return done == options.total_steps
        return True


def _is_due(done: int, interval: int, is_end: bool) -> bool:
    return is_end or (interval > 0 and done % interval == 0)
