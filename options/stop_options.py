"""Options about ending a run before its last step."""

from dataclasses import dataclass
from typing import Any

from options.fields import OptionError, option


@dataclass(kw_only=True)
class StopOptions:
    """Early stopping"""

    early_stop: int = option(
        0, "evaluations in a row without a better figure that end the run; 0: never", at_least=0
    )
    early_stop_metric: str = option(
        "loss", "held-out figure that has to improve, by its name in the log"
    )
    early_stop_delta: float = option(0.0, "an improvement is more than this", at_least=0)


def check_stop(run: Any) -> None:
    """Refuses early stopping without evaluations.

    Raises:
        OptionError: names the options.
    """
    if run.early_stop and (run.eval_samples == 0 or run.eval_steps == 0):
        missing = "--eval-samples 0" if run.eval_samples == 0 else "--eval-steps 0"
        raise OptionError(
            f"--early-stop {run.early_stop} came with {missing}. Evaluations during training were "
            "expected, because they decide when it stops: give --eval-steps, or leave --early-stop "
            "out."
        )
