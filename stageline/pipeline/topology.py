"""How many stages, ranks and replicas a run has, from what was asked for. Starts no process."""

from dataclasses import dataclass

from stageline.errors import UserError
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
    if dp_degree is None:
        dp_degree = max(1, (world_size or num_ranks) // num_ranks)
    if world_size is not None and world_size != num_ranks * dp_degree:
        raise UserError(
            f"{world_size} processes were started, the run has {num_ranks * dp_degree}: "
            f"{num_ranks} ranks (--num-stages {num_stages} / {per_rank} stages a rank) x "
            f"{dp_degree} replicas (--dp-degree). Each rank has a process of its own: set "
            "--num-stages, --dp-degree or torchrun --nproc-per-node accordingly."
        )
    made = make_schedule(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return Topology(made, dp_degree)


def _ranks_of(world_size: int | None, dp_degree: int | None) -> int:
    return max(1, (world_size or 1) // (dp_degree or 1))
