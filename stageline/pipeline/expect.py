"""What a step is expected to take on given stages: seconds, bubble, memory. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.pipeline.cost import Cost, ModelCosts, durations_of, flow_of
from stageline.pipeline.memory_plan import MemoryRules, RankMemory, rank_memory
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.simulate import Durations, Simulation, simulate


def expected(durations: Durations, schedule: Schedule, num_micro_batches: int) -> Simulation:
    """The ideal step with given pass times: its `seconds` and its `bubble`."""
    orders = schedule.orders(num_micro_batches)
    return simulate(orders, durations, num_stages=schedule.num_stages)


@dataclass(frozen=True)
class Expectation:
    """A partition with what follows from it.

    Attributes:
        stages: the cost of each stage.
        seconds: of a step without its update; 0 where nothing was measured.
        bubble: the idle share of the ranks.
        memory: of each rank.
    """

    partition: list[int]
    schedule: Schedule
    num_micro_batches: int
    stages: list[Cost]
    seconds: float
    bubble: float
    memory: list[RankMemory]

    @property
    def slowest(self) -> float:
        """Seconds of a micro-batch on the slowest rank."""
        return max(rank_seconds(self.stages, self.schedule))


def expect(
    costs: ModelCosts,
    partition: Sequence[int],
    schedule: Schedule,
    *,
    num_micro_batches: int,
    rules: MemoryRules,
) -> Expectation:
    """Simulates a step with this partition."""
    stages = costs.stages(partition)
    step = simulate(
        schedule.orders(num_micro_batches),
        durations_of(stages),
        num_stages=len(stages),
        flow=flow_of(stages),
        hand_over=costs.hand_over,
    )
    memory = rank_memory(
        costs, partition, schedule, num_micro_batches=num_micro_batches, rules=rules
    )
    return Expectation(
        partition=list(partition),
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        stages=stages,
        seconds=step.seconds,
        bubble=step.bubble,
        memory=memory,
    )


def rank_seconds(stages: Sequence[Cost], schedule: Schedule) -> list[float]:
    """The least that each rank computes for one micro-batch."""
    splits = schedule.splits_backward
    return [
        sum(stages[stage].seconds(splits_backward=splits) for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    ]
