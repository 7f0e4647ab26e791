"""The schedules by name, and what each asks of the number of micro-batches. Loads no model."""

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
)

from stageline.errors import UserError

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}


def check_micro_batches(schedule: str, *, num_micro_batches: int, num_stages: int) -> None:
    """Refuses a number of micro-batches that the schedule cannot run.

    Raises:
        UserError: unknown schedule, or fewer micro-batches than stages for 1F1B.
    """
    if schedule not in SCHEDULES:
        raise UserError(
            f"--schedule {schedule} is unknown, expected one of {', '.join(SCHEDULES)}."
        )
    if schedule == "1f1b" and num_micro_batches < num_stages:
        raise UserError(
            f"{num_micro_batches} micro-batches can't fill {num_stages} stages (1F1B needs one a "
            f"stage): raise --batch-size to {num_stages} micro-batches, lower --micro-batch-size, "
            "or use fewer stages."
        )


def ideal_bubble(*, num_stages: int, num_micro_batches: int) -> float:
    """The idle share of GPipe and 1F1B at equal stages: (p - 1) / (m + p - 1)."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
