"""Ends a run whose held-out figure no longer improves."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from stageline.training.figure_order import is_better


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
        return (
            f"{self.count} evaluations without a better {self.metric} (best: {best}): the run ends "
            "here (--early-stop)"
        )
