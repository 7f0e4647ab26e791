"""Which split of the layers is best for a run: by bytes, or by seconds within each memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stageline.pipeline.cost import Cost, ModelCosts
from stageline.pipeline.expect import Expectation, expect, rank_seconds
from stageline.pipeline.memory_plan import MemoryRules, RankMemory, most_in_flight, stage_peak
from stageline.pipeline.partition_dp import best_split, smallest_maximum
from stageline.pipeline.schedules import Schedule

StageValue = Callable[[int, Cost], float]  # (stage, its cost)
MOST_SPLITS = 3000  # up to so many are all looked at


@dataclass(frozen=True)
class Placement:
    """A run whose layers are to be placed.

    Attributes:
        capacities: bytes of each rank's device; None: not known, so all fits.
        most_splits, most_steps: how long to look where stages depend on each other.
    """

    costs: ModelCosts
    schedule: Schedule
    num_micro_batches: int
    rules: MemoryRules = MemoryRules()
    capacities: tuple[int, ...] | None = None
    most_splits: int = MOST_SPLITS
    most_steps: int = 300

    def expect(self, partition: Sequence[int]) -> Expectation:
        """What a step takes with this partition."""
        return expect(
            self.costs,
            partition,
            self.schedule,
            num_micro_batches=self.num_micro_batches,
            rules=self.rules,
        )

    def overshoot(self, memory: Sequence[RankMemory]) -> int:
        """Bytes that do not fit, over all ranks."""
        if self.capacities is None:
            return 0
        pairs = zip(memory, self.capacities, strict=True)
        return sum(max(0, rank.peak - capacity) for rank, capacity in pairs)

    def by_parameters(self) -> list[int]:
        """The split whose largest stage has the fewest bytes of weights."""
        return self._chain(lambda stage, cost: cost.weights)

    def by_seconds(self) -> list[int]:
        """The best split by measured times.

        With one stage a rank the slowest stage is the smallest possible under the memory of each
        device. With several the simulated step is the shortest: exactly for a few thousand
        possible splits, else as far as moving single layers leads. Where nothing fits, the split
        that comes nearest.
        """
        if self.schedule.num_stages > self.schedule.num_ranks:
            starts = [self._chain(self._seconds), self.by_parameters()]
            return best_split(
                starts,
                self._step_value,
                bound=self._step_bound,
                most_splits=self.most_splits,
                most_values=self.most_steps,
            )
        fitting = self._chain_or_none(
            lambda stage, cost: self._seconds(stage, cost) if self._fits(stage, cost) else math.inf
        )
        return fitting or self._chain(self._fullness)

    # -- one stage a rank: each stage by itself --------------------------------------------

    def _chain_or_none(self, value: StageValue) -> list[int] | None:
        return smallest_maximum(
            self.costs.num_layers,
            self.schedule.num_stages,
            lambda stage, start, end: value(stage, self.costs.stage(start, end)),
        )

    def _chain(self, value: StageValue) -> list[int]:
        found = self._chain_or_none(value)
        assert found is not None
        return found

    def _seconds(self, stage: int, cost: Cost) -> float:
        return cost.seconds(splits_backward=self.schedule.splits_backward)

    def _fits(self, stage: int, cost: Cost) -> bool:
        return self._fullness(stage, cost) <= 1

    def _fullness(self, stage: int, cost: Cost) -> float:
        if self.capacities is None:
            return 0.0
        peak = stage_peak(
            self.costs,
            cost,
            stage=stage,
            num_stages=self.schedule.num_stages,
            in_flight=self._in_flight[stage],
            num_micro_batches=self.num_micro_batches,
            rules=self.rules,
        )
        return peak / self.capacities[self.schedule.rank_of_stage[stage]]

    @cached_property
    def _in_flight(self) -> list[int]:
        return most_in_flight(self.schedule, self.num_micro_batches)

    # -- several stages a rank: the step as a whole ----------------------------------------

    def _step_value(self, partition: Sequence[int]) -> tuple[float, float]:
        expectation = self.expect(partition)
        return (self.overshoot(expectation.memory), expectation.seconds)

    def _step_bound(self, partition: Sequence[int]) -> tuple[float, float]:
        """No step is shorter than the work of its slowest rank."""
        slowest = max(rank_seconds(self.costs.stages(partition), self.schedule))
        return (0, self.num_micro_batches * slowest * (1 - 1e-9))
