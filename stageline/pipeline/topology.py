"""Compute the stages, ranks and replicas of a run from its options. Starts no process."""

from dataclasses import dataclass

from stageline.errors import UserError
from stageline.pipeline.schedules import (
    Schedule,
    default_stages_per_rank,
    make_schedule,
    read_schedule,
)


@dataclass(frozen=True)
class Topology:
    """The shape of a run: the schedule of one pipeline, and its number of replicas."""

    schedule: Schedule
    dp_degree: int

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_ranks(self) -> int:
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
    """Fill in what was left open.

    Args:
        world_size: processes that were started already; None: they will be started as needed.
    """
    if schedule.endswith(".csv"):
        made = read_schedule(schedule, stages_per_rank=stages_per_rank)
        if num_stages not in (None, made.num_stages):
            raise UserError(
                f"`schedule` {schedule} has {made.num_stages} stages on {made.num_ranks} ranks, "
                f"not `num_stages` {num_stages}. Drop the option or change the file."
            )
    else:
        per_rank = stages_per_rank or default_stages_per_rank(schedule)
        if num_stages is None:
            num_stages = per_rank * max(1, (world_size or 1) // (dp_degree or 1))
        if num_stages % per_rank:
            below = num_stages // per_rank * per_rank
            raise UserError(
                f"`num_stages` {num_stages} can't be spread over ranks of {per_rank} stages "
                f"(`schedule` {schedule}). Set `num_stages` to {below or per_rank} or "
                f"{below + per_rank}."
            )
        num_ranks = num_stages // per_rank
        made = make_schedule(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    if dp_degree is None:
        dp_degree = max(1, (world_size or made.num_ranks) // made.num_ranks)
    if world_size not in (None, made.num_ranks * dp_degree):
        raise UserError(
            f"{world_size} processes were started, the run has {made.num_ranks * dp_degree}: "
            f"{made.num_ranks} ranks x {dp_degree} replicas. Set `num_stages`, `dp_degree` or "
            "torchrun --nproc-per-node accordingly."
        )
    return Topology(made, dp_degree)


def uniform_partition(
    num_layers: int, num_stages: int, *, visual_gpu_ratio: float = 0.0
) -> list[int]:
    """Place `num_layers` on `num_stages` as evenly as whole layers allow.

    Args:
        visual_gpu_ratio: how many stages' worth of work a vision tower on stage 0 is; stage 0
            counts as `1 - ratio` of a stage, from 1 on as none. Each stage has at least one layer.
    """
    if num_stages > num_layers:
        raise UserError(
            f"{num_layers} layers can't fill {num_stages} stages. Set `num_stages` to {num_layers} "
            "or less."
        )
    capacities = [max(0.0, 1.0 - visual_gpu_ratio)] + [1.0] * (num_stages - 1)
    total = sum(capacities)
    if total == 0:  # one stage that holds everything
        return [num_layers]
    ideal = [num_layers * capacity / total for capacity in capacities]
    counts = [max(1, int(share)) for share in ideal]
    # the first stage also embeds and the last one has the head: ties go to the middle
    middle = (num_stages - 1) / 2

    def gain(stage: int) -> tuple[float, float]:
        return (round(ideal[stage] - counts[stage], 9), -abs(stage - middle))

    while sum(counts) < num_layers:
        counts[max(range(num_stages), key=gain)] += 1
    while sum(counts) > num_layers:  # the guaranteed layer of a small stage came from a large one
        shrinkable = [stage for stage, count in enumerate(counts) if count > 1]
        counts[min(shrinkable, key=gain)] -= 1
    return counts


def no_tower(option: str, value: object, model_type: str) -> UserError:
    """Return the error of an option that places a vision tower, for a model without one."""
    return UserError(
        f"`{option}` {value} is for a vision tower, and {model_type} has none. Drop `{option}`."
    )


def explicit_partition(
    counts: list[int], *, num_layers: int, num_stages: int, least: int = 1
) -> list[int]:
    """Check layer counts such as `partition 8,8,7,9`; `least` is 0 for pieces of the planner."""
    if len(counts) != num_stages or min(counts) < least or sum(counts) != num_layers:
        shown = ",".join(map(str, counts))
        raise UserError(
            f"`partition` {shown} names {len(counts)} stages, the run has {num_stages}; {shown} "
            f"sums to {sum(counts)}, the model has {num_layers} layers. Give one count a stage, "
            "each at least 1, with that sum."
        )
    return list(counts)


def stage_layers(
    counts: list[int] | None,
    *,
    num_layers: int,
    num_stages: int,
    vision_stages: int = 0,
    visual_gpu_ratio: float = 0.0,
    least: int = 1,
) -> list[int]:
    """Return the layers of each stage, as given or evenly; those of a vision tower have none."""
    rest = num_stages - vision_stages
    if rest < 1:
        raise UserError(
            f"`vision_stages` {vision_stages} of {num_stages} stages leaves none for the decoder. "
            f"Use `num_stages` {vision_stages + 1} or more."
        )
    if counts is None:
        counts = uniform_partition(num_layers, rest, visual_gpu_ratio=visual_gpu_ratio)
    counts = explicit_partition(counts, num_layers=num_layers, num_stages=rest, least=least)
    return [0] * vision_stages + counts


def layer_range(partition: list[int], stage: int) -> range:
    """Return the global indices of the layers that `stage` owns."""
    start = sum(partition[:stage])
    return range(start, start + partition[stage])
