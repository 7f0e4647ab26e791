"""Place layers on stages: by bytes, or by seconds within each memory. Pure arithmetic.

One dynamic programme, `smallest_maximum`, makes all partitions where the cost of a stage depends on
its own layers only; `improved` moves single layers where it does not.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from transformers import PretrainedConfig

from stageline.errors import spelled
from stageline.pipeline.schedules import SCHEDULES, Schedule, make_schedule
from stageline.planner.estimate import (
    Cost,
    MemoryRules,
    ModelCosts,
    RankMemory,
    decode_bytes,
    durations_of,
    flow_of,
    memory_of,
    model_on_meta,
    most_in_flight,
    rank_memory,
)
from stageline.planner.simulate import simulate

FIT_ATTEMPTS, FIT_VALUES = 10, 100  # searches for a split that fits, and splits that each asks for
StageCost = Callable[[int, int, int], float]  # (stage, first layer, last layer + 1)


def smallest_maximum(num_layers: int, num_stages: int, cost: StageCost) -> list[int] | None:
    """Minimises the dearest stage, exactly; among the best, the sum of squares of the others.

    Args:
        cost: of a stage with these layers; infinite where it must not be.

    Returns:
        Layers per stage, at least one each; None where every split has an infinite cost.
    """
    known = cache(cost)
    limit, _ = _best_chain(num_layers, num_stages, known, combine=max)
    if math.isinf(limit):
        return None
    above = math.nextafter(limit, math.inf)

    def squared(stage: int, start: int, end: int) -> float:
        value = known(stage, start, end)
        return value * value if value <= above else math.inf

    return _best_chain(num_layers, num_stages, squared, combine=float.__add__)[1]


def _best_chain(
    num_layers: int, num_stages: int, cost: StageCost, *, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Dynamic programming over (stages used, layers placed)."""
    best: list[tuple[float, list[int]]] = [(math.inf, [])] * (num_layers + 1)
    best[0] = (0.0, [])
    for stage in range(num_stages):
        behind = num_stages - 1 - stage  # stages that still need a layer
        row: list[tuple[float, list[int]]] = [(math.inf, [])] * (num_layers + 1)
        ends = [num_layers] if behind == 0 else range(stage + 1, num_layers - behind + 1)
        for end in ends:
            for start in range(stage, end):
                before, split = best[start]
                if math.isinf(before):
                    continue
                value = combine(before, float(cost(stage, start, end)))
                if value < row[end][0]:
                    row[end] = value, [*split, end - start]
        best = row
    return best[num_layers]


def improved(
    split: Sequence[int], value: Callable[[Sequence[int]], tuple[float, ...]], *, most_values: int
) -> list[int]:
    """Move single layers between any two stages as long as that makes the value smaller.

    Args:
        value: what is minimised, where no rule makes the stages independent.
        most_values: how often it may be asked for.
    """
    best, best_value, asked = list(split), value(split), 0
    is_better = True
    while is_better:
        is_better = False
        for giver, taker in itertools.permutations(range(len(best)), 2):
            if best[giver] == 1 or asked == most_values:
                continue
            asked += 1
            moved = list(best)
            moved[giver] -= 1
            moved[taker] += 1
            if (found := value(moved)) < best_value:
                best, best_value, is_better = moved, found, True
    return best


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
        """Seconds of a micro-batch on the slowest rank, at least."""
        splits = self.schedule.splits_backward
        seconds = [stage.seconds(splits_backward=splits) for stage in self.stages]
        ranks = range(self.schedule.num_ranks)
        return max(sum(seconds[one] for one in self.schedule.stages_of(rank)) for rank in ranks)


StageValue = Callable[[int, Cost], float]  # (stage, its cost)


@dataclass(frozen=True)
class Placement:
    """A run whose layers are to be placed.

    Attributes:
        capacities: bytes of each rank's device; None: not known, so all fits.
        most_steps: simulated steps where stages depend on each other.
    """

    costs: ModelCosts
    schedule: Schedule
    num_micro_batches: int
    rules: MemoryRules = MemoryRules()
    capacities: tuple[int, ...] | None = None
    most_steps: int = 300

    def expect(self, partition: Sequence[int]) -> Expectation:
        """Simulate a step with this partition."""
        costs, schedule, count = self.costs, self.schedule, self.num_micro_batches
        stages = costs.stages(partition)
        step = simulate(
            schedule.orders(count),
            durations_of(stages),
            num_stages=len(stages),
            flow=flow_of(stages),
            hand_over=costs.hand_over,
        )
        memory = self.memory(partition)
        return Expectation(
            list(partition), schedule, count, stages, step.seconds, step.bubble, memory
        )

    def memory(self, partition: Sequence[int]) -> list[RankMemory]:
        """Return the memory of each rank with this partition."""
        return rank_memory(
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
        device. With several the simulated step is as short as moving single layers makes it. Where
        nothing fits, the split that comes nearest.
        """
        if self.schedule.num_stages > self.schedule.num_ranks:

            def step_value(partition: Sequence[int]) -> tuple[float, float]:
                expectation = self.expect(partition)
                return (self.overshoot(expectation.memory), expectation.seconds)

            starts = self._chain(self._seconds), self.by_parameters()
            start = self._fitted(min(starts, key=step_value))
            return improved(start, step_value, most_values=self.most_steps)
        fitting = self._chain(
            lambda stage, cost: (
                self._seconds(stage, cost) if self._fullness(stage, cost) <= 1 else math.inf
            )
        )
        return fitting or self._chain(self._fullness)

    def _fitted(self, start: list[int]) -> list[int]:
        """Return the split, or where it overfills a device one that does so less.

        What empties one device fills another: where single moves end, they begin again from
        random splits near the best one, unless all devices together have too little memory.
        """

        def overfill(split: Sequence[int]) -> tuple[int, int, int]:
            memory = self.memory(split)
            peaks = [rank.peak for rank in memory]
            return self.overshoot(memory), max(peaks), sum(peaks)

        rng, best, least = random.Random(0), start, overfill(start)
        for attempt in range(FIT_ATTEMPTS):
            excess, _, total = least
            if not excess or total > 1.2 * sum(self.capacities or ()):
                break
            near = list(best)
            for giver, taker in (rng.sample(range(len(near)), 2) for _ in range(2 * attempt)):
                if near[giver] > 1:
                    near[giver] -= 1
                    near[taker] += 1
            found = improved(near, overfill, most_values=FIT_VALUES)
            if (value := overfill(found)) < least:
                best, least = found, value
        return best

    def _chain(self, value: StageValue) -> list[int]:
        """Return the split whose most expensive stage is cheapest; empty if none is finite."""
        found = smallest_maximum(
            self.costs.num_layers,
            self.schedule.num_stages,
            lambda stage, start, end: value(stage, self.costs.stage(start, end)),
        )
        return found or []

    def _seconds(self, stage: int, cost: Cost) -> float:
        return cost.seconds(splits_backward=self.schedule.splits_backward)

    def _fullness(self, stage: int, cost: Cost) -> float:
        if self.capacities is None:
            return 0.0
        memory = memory_of(
            self.costs,
            {stage: cost},
            num_stages=self.schedule.num_stages,
            activations=self._in_flight[stage] * cost.saved + cost.transient,
            num_micro_batches=self.num_micro_batches,
            rules=self.rules,
        )
        return memory.peak / self.capacities[self.schedule.rank_of_stage[stage]]

    @cached_property
    def _in_flight(self) -> list[int]:
        return most_in_flight(self.schedule, self.num_micro_batches)


MOST_STAGES_PER_RANK = 4
AS_GOOD = 1.01  # times closer than this are a tie: less memory and fewer stages decide


@dataclass(frozen=True)
class Choice:
    """One way to run; `overshoot` is the bytes that do not fit."""

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
        """Return the options of this choice, spelled as the user types them."""
        words = [f"`schedule` {self.schedule.name}", f"`num_stages` {self.schedule.num_stages}"]
        if self.stages_per_rank > 1:
            words.append(f"`stages_per_rank` {self.stages_per_rank}")
        words.append(f"`micro_batch_size` {self.micro_batch_size}")
        words.append(f"`partition` {','.join(map(str, self.expectation.partition))}")
        return spelled(" ".join(words))


def advise(
    costs_of_size: Mapping[int, ModelCosts],
    *,
    num_ranks: int,
    num_samples: int,
    rules: MemoryRules,
    capacities: tuple[int, ...] | None = None,
) -> list[Choice]:
    """Return all ways to run a step on `num_ranks` ranks, simulated, the most promising first.

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
                most_steps=40,
            )
            found = placement.expect(placement.by_seconds())
            choices.append(Choice(size, found, placement.overshoot(found.memory)))
    best = min(choices, key=lambda c: (c.overshoot, c.expectation.seconds), default=None)

    def rank(choice: Choice) -> tuple[float, ...]:
        """Sort by memory that lacks and by time; near-best choices by simplicity."""
        assert best is not None
        seconds = choice.expectation.seconds
        is_tie = seconds <= best.expectation.seconds * AS_GOOD
        return choice.overshoot, 0 if is_tie else seconds, choice.stages_per_rank, choice.peak

    return sorted(choices, key=rank)


def legal_schedules(num_ranks: int, num_micro_batches: int, num_layers: int) -> Iterator[Schedule]:
    """Yield every schedule that can be run, with every number of stages."""
    for name, kind in SCHEDULES.items():
        counts: Sequence[int] = [1]
        if kind.is_v or kind.is_multi:
            counts = [2] if kind.is_v else range(2, MOST_STAGES_PER_RANK + 1)
        for stages_per_rank in counts:
            if num_ranks * stages_per_rank > num_layers:
                continue
            schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
            if schedule.legal_micro_batches(num_micro_batches) == num_micro_batches:
                yield schedule


def decode_partition(
    config: PretrainedConfig,
    num_stages: int,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> list[int] | None:
    """Layers per stage, from the bytes of weights that a decode step reads; loads nothing.

    None: the model has fewer layers, or they are not where `layers_path` looks, as with BERT and
    LongCat.
    """
    try:
        model = model_on_meta(config, dtype=dtype, trust_remote_code=trust_remote_code)
        layers, back = decode_bytes(model)
    except (ValueError, AttributeError):  # the builder refuses a config without a model
        return None
    sums = [0, *itertools.accumulate(layers)]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (back if stage == num_stages - 1 else 0)

    return smallest_maximum(len(layers), num_stages, cost)
