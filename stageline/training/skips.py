"""Which steps change no weight, and how many did: infinite losses or gradients, nan, spikes.

Decides from figures that every rank has, and remembers only what a checkpoint can hold, so that
all ranks, and a resumed run, decide the same.
"""

import math
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

from stageline.errors import NonFiniteError

SPIKE_WINDOW = 64
SPIKE_LEAST = 16  # of fewer losses the deviation says little


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a step.

    Attributes:
        problem: in words; None: nothing.
        is_skipped: no weight may change.
        is_finite: the loss and the gradients are numbers.
    """

    problem: str | None = None
    is_skipped: bool = False
    is_finite: bool = True


class Skips:
    """Judges steps and counts those that are skipped.

    Args:
        max_in_a_row: so many skipped ones in a row end a run; 1: the first one does.
        spike_sigma: a loss so many standard deviations above the mean of the last
            `SPIKE_WINDOW` finite ones is a spike; 0: none is.
        spike_action: whether a step with a spike is skipped, or only told of.

    Attributes:
        total: steps that were skipped since the start of the run.
        in_a_row: those since the last good step.
        losses: the last finite ones, also of spikes: a level that lasts is no spike for long.
    """

    def __init__(
        self,
        *,
        max_in_a_row: int = 20,
        spike_sigma: float = 0.0,
        spike_action: Literal["warn", "skip"] = "warn",
    ) -> None:
        self.max_in_a_row = max_in_a_row
        self.spike_sigma = spike_sigma
        self.spike_action = spike_action
        self.total = 0
        self.in_a_row = 0
        self.losses: list[float] = []

    def judge(self, loss: float, extra_loss: float, grad_norm: float) -> Verdict:
        """Decides about one step and counts it; every rank calls this once a step."""
        verdict = self._judge(loss, extra_loss, grad_norm)
        self.total += verdict.is_skipped
        self.in_a_row = self.in_a_row + 1 if verdict.is_skipped else 0
        if math.isfinite(loss):
            self.losses = [*self.losses, loss][-SPIKE_WINDOW:]
        return verdict

    def check(self, problem: str | None, *, step: int) -> None:
        """Ends a run that only skips.

        Args:
            problem: of the last step.
            step: its number, from 1.

        Raises:
            NonFiniteError: as many steps in a row were skipped as are allowed.
        """
        if self.in_a_row < self.max_in_a_row:
            return
        which = (
            f"step {step} was skipped"
            if self.max_in_a_row == 1
            else f"{self.in_a_row} steps in a row up to step {step} were skipped, the last one"
        )
        raise NonFiniteError(
            f"{which} because {problem}. Finite numbers were expected: no weight has changed, and "
            "checkpoints are as they were. Look at these rows, lower --learning-rate, use --bf16 "
            "instead of --fp16, or allow more skipped steps with --max-skipped-steps (now "
            f"{self.max_in_a_row})."
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; with them a resumed run decides as the uninterrupted one."""
        return {"total": self.total, "in_a_row": self.in_a_row, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.total = int(state["total"])
        self.in_a_row = int(state["in_a_row"])
        self.losses = [float(loss) for loss in state["losses"]]

    def _judge(self, loss: float, extra_loss: float, grad_norm: float) -> Verdict:
        named = {"loss": loss, "router loss": extra_loss, "gradient norm": grad_norm}
        for name, value in named.items():
            if not math.isfinite(value):
                return Verdict(f"the {name} is {value}", is_skipped=True, is_finite=False)
        if self.spike_sigma == 0 or len(self.losses) < SPIKE_LEAST:
            return Verdict()
        mean, deviation = fmean(self.losses), pstdev(self.losses)
        if loss <= mean + self.spike_sigma * deviation:
            return Verdict()
        return Verdict(
            f"the loss {loss:.4f} is a spike, more than {self.spike_sigma:g} standard deviations "
            f"({deviation:.4f}) above the mean {mean:.4f} of the last {len(self.losses)}",
            is_skipped=self.spike_action == "skip",
        )
