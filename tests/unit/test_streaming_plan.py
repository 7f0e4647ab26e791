"""Plans of the streaming engine: what covers a model, in which order it runs, what is chosen."""

import itertools
import random

import pytest

from stageline.streaming.plan import LayerCost, Plan, choose, slot_times, start_times, wavefront


@pytest.mark.parametrize(
    ("forward", "backward", "words"),
    [
        ([range(0, 2)], [range(3, 4), range(0, 3)], "layer 2: the forward"),
        ([range(0, 2), range(2, 2)], [range(2, 4), range(0, 2)], "no stage may be empty"),
        ([range(0, 3)], [range(3, 4), range(1, 3)], "layer 0: the backward"),
        ([range(0, 3)], [], "layer 3: the"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_layer(forward, backward, words):
    with pytest.raises(ValueError, match=words):
        Plan(tuple(forward), tuple(backward)).check(4)


def test_the_order_of_a_wavefront():
    for slots, lanes, parts in itertools.product((1, 2, 3, 7), (1, 2, 3), (1, 2, 4)):
        order = list(wavefront(slots, lanes, parts))
        assert sorted(order) == list(itertools.product(range(slots), range(parts)))
        at = {each: place for place, each in enumerate(order)}
        for slot, part in order:
            before = [(slot - 1, part), (slot, part - 1), (slot - lanes, parts - 1)]
            assert all(at[each] < at[slot, part] for each in before if each in at)
    # two lanes, three micro-batches: the second slot follows one behind the first
    assert list(wavefront(2, 2, 3)) == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]


def test_starts_by_hand():
    # lane 0 has slots 0 and 2, lane 1 slot 1
    assert start_times([1, 2, 1], 2, 2) == [[0, 1], [1, 3], [3, 5]]


@pytest.mark.parametrize(("lanes", "slots", "parts"), [(2, 4, 3), (3, 6, 4), (4, 8, 8)])
def test_equal_slots_are_idle_as_the_formula_says(lanes, slots, parts):
    waits = lanes * (lanes - 1)
    expected = waits / (parts * slots + waits)
    end = max(own[-1] + 2.5 for own in start_times([2.5] * slots, lanes, parts))
    assert 1 - 2.5 * slots * parts / (end * lanes) == pytest.approx(expected)


def random_costs(draw, num_layers):
    return [
        LayerCost(
            forward := draw.uniform(0.5, 2),
            2 * forward,
            draw.randrange(1, 40),
            draw.choice((0, 30)),
            draw.randrange(20),
        )
        for _ in range(num_layers)
    ]


def test_chosen_plans_cover_the_model_within_the_budget():
    draw = random.Random(3)
    for _ in range(100):
        costs = random_costs(draw, draw.randrange(1, 30))
        largest = max(cost.backward_bytes for cost in costs)
        budget = draw.choice((None, 2 * largest, draw.randrange(2, 9) * largest))
        lanes = draw.choice((1, 1, 2, 3, 4))
        plan = choose(costs, num_lanes=lanes, num_microbatches=lanes + 1, budget=budget)
        plan.check(len(costs))
        if budget is not None:
            for stage in plan.forward:
                assert sum(costs[layer].weight_bytes for layer in stage) <= budget // 2
            for stage in plan.backward:
                assert sum(costs[layer].backward_bytes for layer in stage) <= budget // 2


def test_one_lane_without_a_budget_recomputes_nothing():
    costs = random_costs(random.Random(1), 12)
    plan = choose(costs, num_lanes=1, num_microbatches=2)
    assert plan == Plan((), (range(0, 12),))


def test_one_lane_has_the_fewest_stages_that_fit():
    costs = [LayerCost(1, 2, 10, 10, 5)] * 8
    plan = choose(costs, num_lanes=1, num_microbatches=2, budget=100)
    assert plan.backward == (range(6, 8), range(4, 6), range(2, 4), range(0, 2))
    assert plan.forward == (range(0, 5), range(5, 6))


def test_several_lanes_get_nearly_the_best_cut():
    """Against every plan of even stages there is, by the same recurrence."""
    draw = random.Random(5)
    for _ in range(15):
        costs = random_costs(draw, 6)
        chosen = choose(costs, num_lanes=2, num_microbatches=3)

        def end(plan, costs=costs):
            times = slot_times(plan, costs)
            return max(own[-1] + time for own, time in zip(start_times(times, 2, 3), times))

        best = min(end(plan) for plan in all_plans(6))
        assert end(chosen) <= 1.15 * best


def all_plans(num_layers):
    for backward in cuts(num_layers):
        backward = backward[::-1]
        for forward in cuts(backward[0].start):
            yield Plan(tuple(forward), tuple(backward))


def cuts(num_layers):
    if num_layers == 0:
        return [[]]
    found = []
    for inner in itertools.product((False, True), repeat=num_layers - 1):
        borders = [0, *(at for at, is_cut in enumerate(inner, 1) if is_cut), num_layers]
        found.append([range(*pair) for pair in itertools.pairwise(borders)])
    return found


def test_a_layer_that_cannot_fit_is_named():
    costs = [LayerCost(1, 2, 10, 15, 25), LayerCost(1, 2, 10, 20, 30)]
    with pytest.raises(ValueError, match="layer 1 needs 60 bytes.*at most 50"):
        choose(costs, num_lanes=1, num_microbatches=1, budget=100)
