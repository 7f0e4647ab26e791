"""Which schedule, number of stages a rank, micro-batches and split promise the shortest step.

By simulation, for a fixed number of ranks and of samples in a step. Pure arithmetic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stageline.pipeline.cost import ModelCosts
from stageline.pipeline.expect import Expectation
from stageline.pipeline.memory_plan import MemoryRules
from stageline.pipeline.placement import Placement
from stageline.pipeline.schedules import SCHEDULES, Schedule, ScheduleKind, make_schedule

MOST_STAGES_PER_RANK = 4
AS_GOOD = 1.01  # times closer than this are a tie: less memory and fewer stages decide


@dataclass(frozen=True)
class Choice:
    """One way to run.

    Attributes:
        overshoot: bytes that do not fit.
    """

    micro_batch_size: int
    expectation: Expectation
    overshoot: int

    @property
    def schedule(self) -> Schedule:
        return self.expectation.schedule

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(rank.peak for rank in self.expectation.memory)

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.num_stages // self.schedule.num_ranks

    def options(self) -> str:
        """As it is typed."""
        words = [f"--schedule {self.schedule.name}", f"--num-stages {self.schedule.num_stages}"]
        if self.stages_per_rank > 1:
            words.append(f"--stages-per-rank {self.stages_per_rank}")
        words.append(f"--micro-batch-size {self.micro_batch_size}")
        words.append(f"--partition {','.join(map(str, self.expectation.partition))}")
        return " ".join(words)


def advise(
    costs_of_size: Mapping[int, ModelCosts],
    *,
    num_ranks: int,
    num_samples: int,
    rules: MemoryRules,
    capacities: tuple[int, ...] | None = None,
    most_splits: int = 200,
    most_steps: int = 40,
) -> list[Choice]:
    """All ways, the most promising first.

    Args:
        costs_of_size: micro-batch size -> measured costs.
        num_samples: of one step on one pipeline.
    """
    choices = []
    for size, costs in costs_of_size.items():
        for schedule in legal_schedules(num_ranks, num_samples // size, costs.num_layers):
            placement = Placement(
                costs,
                schedule,
                num_samples // size,
                rules=rules,
                capacities=capacities,
                most_splits=most_splits,
                most_steps=most_steps,
            )
            found = placement.expect(placement.by_seconds())
            choices.append(Choice(size, found, placement.overshoot(found.memory)))
    return _ranked(choices)


def legal_schedules(num_ranks: int, num_micro_batches: int, num_layers: int) -> Iterator[Schedule]:
    """Every schedule that can be run, with every number of stages."""
    for name, kind in SCHEDULES.items():
        for stages_per_rank in _numbers_of_stages(kind):
            if num_ranks * stages_per_rank > num_layers:
                continue
            schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
            if schedule.legal_micro_batches(num_micro_batches) == num_micro_batches:
                yield schedule


def _numbers_of_stages(kind: ScheduleKind) -> Sequence[int]:
    if kind.is_v:
        return [2]
    return range(2, MOST_STAGES_PER_RANK + 1) if kind.is_multi else [1]


def _ranked(choices: Sequence[Choice]) -> list[Choice]:
    """By time; those as good as the best by simplicity. What does not fit comes last."""
    by_time = sorted(choices, key=lambda c: (c.overshoot, c.expectation.seconds))
    if not by_time:
        return []
    limit = by_time[0].expectation.seconds * AS_GOOD
    is_good = [
        c.overshoot == by_time[0].overshoot and c.expectation.seconds <= limit for c in by_time
    ]
    good = [c for c, keep in zip(by_time, is_good, strict=True) if keep]
    rest = [c for c, keep in zip(by_time, is_good, strict=True) if not keep]
    return sorted(good, key=lambda c: (c.stages_per_rank, c.peak)) + rest
