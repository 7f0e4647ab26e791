"""The planner's splits against brute force over all contiguous splits."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from stageline.pipeline.schedules import make_schedule
from stageline.planner.estimate import Cost, MemoryRules, ModelCosts
from stageline.planner.partition import Placement, improved, smallest_maximum


def random_costs(rng, num_layers, *, saved=0, weights=0):
    def item(scale):
        forward = rng.uniform(0.5, 2) * scale
        return Cost(
            forward=forward,
            backward=2 * forward,
            input_grad=forward,
            weight_grad=forward,
            weights=int(weights * scale),
            saved=int(saved * scale),
            trains=True,
        )

    return ModelCosts(
        overhead=Cost(forward=0.1),
        first=item(rng.choice([0.1, 3])),
        layers=tuple(item(rng.choice([1, 1, 2])) for _ in range(num_layers)),
        last=item(rng.choice([0.5, 2])),
        tied=Cost(),
        border=0,
        batch=0,
        shape=(1, 1),
    )


def every_split(num_layers, num_stages):
    """Yield all ways, with at least one layer a stage."""
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        places = (0, *cuts, num_layers)
        yield [end - start for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_dearest_stage_is_the_smallest_possible(num_stages):
    for seed in range(30):
        rng = random.Random(seed)
        num_layers = rng.randint(num_stages, 9)
        table = {}

        def cost(stage, start, end, table=table, rng=rng):
            chance = math.inf if rng.random() < 0.15 else rng.uniform(1, 10)
            return table.setdefault((stage, start, end), chance)

        def dearest(split, cost=cost):
            ends = [sum(split[: stage + 1]) for stage in range(len(split))]
            return max(cost(stage, end - split[stage], end) for stage, end in enumerate(ends))

        best = min(map(dearest, every_split(num_layers, num_stages)))
        found = smallest_maximum(num_layers, num_stages, cost)
        if math.isinf(best):
            assert found is None
        else:
            assert found is not None and dearest(found) == best


def test_among_equal_bests_the_others_are_even():
    # layer 0 costs the most in any split; the others must not be lumped together
    layers = [10, 1, 1, 1, 1, 1, 1]
    found = smallest_maximum(7, 3, lambda stage, start, end: sum(layers[start:end]))
    assert found == [1, 3, 3]


@pytest.mark.parametrize(
    ("schedule", "limits"), [("1f1b", [400, 600, 900]), ("gpipe", [600, 750, 900])]
)
def test_by_seconds_is_the_best_split_that_fits(schedule, limits):
    """Brute force under memory limits, with one stage a rank."""
    limited = 0
    for seed in range(15):
        rng = random.Random(seed)
        costs = random_costs(rng, 8, saved=10, weights=100)
        capacities = tuple(rng.choice(limits) for _ in range(3))
        placement = Placement(
            costs,
            make_schedule(schedule, num_ranks=3),
            6,
            rules=MemoryRules(optimizer_bytes=0),
            capacities=capacities,
        )
        found = placement.expect(placement.by_seconds())
        every = [placement.expect(split) for split in every_split(8, 3)]
        fitting = [
            e for e in every if all(r.peak <= c for r, c in zip(e.memory, capacities, strict=True))
        ]
        if fitting:
            assert found.slowest == min(e.slowest for e in fitting)
            limited += found.slowest > min(e.slowest for e in every)
        else:  # the one that comes nearest is shown to the user
            fullest = [
                max(r.peak / c for r, c in zip(e.memory, capacities, strict=True)) for e in every
            ]
            own = max(r.peak / c for r, c in zip(found.memory, capacities, strict=True))
            assert own == min(fullest)
    assert limited > 1, "memory must have decided now and then"


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("zbv", 2), ("interleaved_zero_bubble", 3)],
)
def test_no_single_move_shortens_the_step_of_several_stages_a_rank(schedule, stages_per_rank):
    for seed in range(3):
        costs = random_costs(random.Random(seed), 8)
        made = make_schedule(schedule, num_ranks=2, stages_per_rank=stages_per_rank)
        placement = Placement(costs, made, 8)
        found = placement.by_seconds()
        near = [s for s in every_split(8, made.num_stages) if distance(s, found) <= 2]
        assert placement.expect(found).seconds == min(placement.expect(s).seconds for s in near)


def distance(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def test_several_stages_a_rank_fit_first_and_are_quick_second():
    """The quickest split overfills a rank: the quickest near ones that fit best are taken."""
    costs = random_costs(random.Random(3), 7, weights=100)
    made = make_schedule("interleaved_1f1b", num_ranks=2, stages_per_rank=2)
    splits = list(every_split(7, 4))
    free = Placement(costs, made, 8)
    quickest = min(splits, key=lambda split: free.expect(split).seconds)
    fullest = max(rank.peak for rank in free.expect(quickest).memory)
    for room in (fullest - 1, fullest // 2, 2 * fullest):
        placement = Placement(costs, made, 8, capacities=(room, room))

        def value(split, placement=placement):
            found = placement.expect(split)
            return placement.overshoot(found.memory), found.seconds

        found = placement.by_seconds()
        best = min(value(split) for split in splits if distance(split, found) <= 2)
        assert value(found) == best and best[0] == min(map(value, splits))[0]
        assert room != fullest - 1 or value(quickest) > best


@pytest.mark.parametrize(("num_layers", "stages_per_rank"), [(10, 2), (9, 3)])
def test_several_stages_a_rank_fit_where_some_split_does(num_layers, stages_per_rank):
    """Two devices are 2 % larger than the split with the smallest peak needs; ends may be heavy."""
    made = make_schedule("interleaved_1f1b", num_ranks=2, stages_per_rank=stages_per_rank)
    for seed in range(12):
        rng = random.Random(seed)
        costs = random_costs(rng, num_layers, saved=10, weights=100)
        extra = Cost(weights=rng.choice([0, 300, 600]))
        costs = replace(costs, first=costs.first + extra, last=costs.last + extra)
        placement = Placement(costs, made, 6, MemoryRules(optimizer_bytes=0), most_steps=8)
        peaks = [
            max(rank.peak for rank in placement.expect(split).memory)
            for split in every_split(num_layers, made.num_stages)
        ]
        tight = replace(placement, capacities=(int(1.02 * min(peaks)),) * 2)
        assert tight.overshoot(tight.expect(tight.by_seconds()).memory) == 0, seed


def test_single_moves_lead_to_the_lowest_place_of_a_valley():
    target = [5, 9, 2, 4, 7, 3]

    def value(split):
        return (0, sum((a - b) ** 2 for a, b in zip(split, target, strict=True)))

    assert improved([5] * 6, value, most_values=300) == target


def test_parameters_evens_out_bytes():
    costs = random_costs(random.Random(1), 9, weights=100)
    placement = Placement(costs, make_schedule("1f1b", num_ranks=3), 6)

    def largest(split):
        return max(stage.weights for stage in costs.stages(split))

    assert largest(placement.by_parameters()) == min(map(largest, every_split(9, 3)))
