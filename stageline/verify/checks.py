"""Which checks of a scaled-down copy a run needs at its start."""

from stageline.verify.answers import answers as check_answers
from stageline.verify.scaled_copy import Check, packed_rows
from stageline.verify.training import training


def checks_of(*, is_split: bool, answers: bool, num_packed: int) -> dict[str, Check]:
    """Return the checks by the words that the log and the record call them.

    Args:
        answers: the stages will answer, so decoding is checked too.
        num_packed: rows of a micro-batch that hold several samples each; 0: none do.
    """
    checks: dict[str, Check] = {}
    if is_split:
        checks["loss and gradients"] = training
    if num_packed:
        checks[f"{num_packed} packed rows"] = packed_rows(num_packed)
    if answers:
        checks["answers"] = check_answers
    return checks
