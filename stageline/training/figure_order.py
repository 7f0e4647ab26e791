"""Which of two held-out figures is the better one, by the figure's name in the log."""

import math

from stageline.errors import UserError
from stageline.training.evaluation import EvalResult

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
            "stopping go by it: name it with --save-best or --early-stop-metric."
        )
    return figures[name]


def is_better(value: float, best: float, *, metric: str, by: float = 0.0) -> bool:
    """Whether a figure beats the best so far by more than `by`; what is not a number never does."""
    if not math.isfinite(value):
        return False
    lower = any(word in metric for word in FALLING)
    return value < best - by if lower else value > best + by
