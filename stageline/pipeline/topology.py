"""How many stages, ranks and replicas a run has, from what was asked for. Starts no process."""

from dataclasses import dataclass
from pathlib import Path

from stageline.errors import UserError
from stageline.pipeline.schedule_file import read_schedule_file
from stageline.pipeline.schedules import Schedule, default_stages_per_rank, make_schedule


@dataclass(frozen=True)
class Topology:
    """The shape of a run.

    Attributes:
        schedule: for the ranks of one pipeline.
        dp_degree: replicas of the pipeline.
    """

    schedule: Schedule
    dp_degree: int

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_ranks(self) -> int:
        """Processes of one pipeline."""
        return self.schedule.num_ranks

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.dp_degree


def resolve_topology(
    *,
    schedule: str,
    num_stages: int | None = None,
    stages_per_rank: int | None = None,
    dp_degree: int | None = None,
    world_size: int | None = None,
) -> Topology:
    """Fills in what was left open.

    Args:
        num_stages: all stages of the model; None: as many as the processes hold.
        stages_per_rank: None: what the schedule asks for at least.
        dp_degree: None: as many replicas as the processes make.
        world_size: processes that were started already; None: they will be started as needed.

    Raises:
        UserError: numbers that do not fit each other.
    """
    if schedule.endswith(".csv"):
        return _of_file(schedule, num_stages, stages_per_rank, dp_degree, world_size)
    per_rank = stages_per_rank or default_stages_per_rank(schedule)
    if num_stages is None:
        num_stages = per_rank * _ranks_of(world_size, dp_degree)
    if num_stages % per_rank:
        below = num_stages // per_rank * per_rank
        raise UserError(
            f"--num-stages {num_stages} can't be spread over ranks that hold {per_rank} stages "
            f"each (--schedule {schedule}, --stages-per-rank): set --num-stages to "
            f"{' or '.join(str(n) for n in (below, below + per_rank) if n)}."
        )
    num_ranks = num_stages // per_rank
    made = make_schedule(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return _with_replicas(made, dp_degree, world_size)


def _of_file(
    path: str,
    num_stages: int | None,
    stages_per_rank: int | None,
    dp_degree: int | None,
    world_size: int | None,
) -> Topology:
    """The file says how many ranks and stages there are; ranks may hold different numbers."""
    num_ranks = len(read_schedule_file(Path(path)).orders)
    made = make_schedule(path, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    if num_stages not in (None, made.num_stages):
        raise UserError(
            f"--schedule {path} has {made.num_stages} stages on {num_ranks} ranks, --num-stages "
            f"{num_stages} came: leave the option out, or change the file."
        )
    return _with_replicas(made, dp_degree, world_size)


def _with_replicas(schedule: Schedule, dp_degree: int | None, world_size: int | None) -> Topology:
    num_ranks = schedule.num_ranks
    if dp_degree is None:
        dp_degree = max(1, (world_size or num_ranks) // num_ranks)
    if world_size is not None and world_size != num_ranks * dp_degree:
        raise UserError(
            f"{world_size} processes were started, the run has {num_ranks * dp_degree}: "
            f"{num_ranks} ranks ({schedule.num_stages} stages, --num-stages, by --schedule "
            f"{schedule.name}) x {dp_degree} replicas (--dp-degree). Each rank has a process of "
            "its own: set --num-stages, --dp-degree or torchrun --nproc-per-node accordingly."
        )
    return Topology(schedule, dp_degree)


def _ranks_of(world_size: int | None, dp_degree: int | None) -> int:
    return max(1, (world_size or 1) // (dp_degree or 1))
