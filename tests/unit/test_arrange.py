"""Grouping, ordering and packing by length, against brute force and a simulated pipeline."""

import itertools
import random

import pytest

from stageline.data.batches.step_maker import (
    group_by_length,
    order_by_cost,
    pack,
    pack_into,
    padded_cost,
)
from stageline.errors import UserError


def draws(count, *, seed=0, highest=90):
    generator = random.Random(seed)
    return [min(highest, 3 + int(generator.lognormvariate(2.5, 0.8))) for _ in range(count)]


def costs_of(groups, lengths):
    return [padded_cost([lengths[index] for index in group]) for group in groups]


@pytest.mark.parametrize(("count", "num_groups"), [(9, 3), (16, 8), (12, 12), (5, 1)])
def test_groups_hold_each_row_once_and_cost_no_more_than_equal_numbers(count, num_groups):
    lengths = draws(count, seed=count)
    groups = group_by_length(lengths, num_groups)
    assert len(groups) == num_groups and all(groups)
    assert sorted(itertools.chain(*groups)) == list(range(count))
    in_order = sorted(lengths, reverse=True)
    size = -(-count // num_groups)
    equal = [padded_cost(in_order[start : start + size]) for start in range(0, count, size)]
    assert max(costs_of(groups, lengths)) <= max(equal)


@pytest.mark.parametrize("seed", range(2))
def test_the_costliest_group_is_as_cheap_as_any_cut_allows(seed):
    lengths = draws(9, seed=seed)
    in_order = sorted(lengths, reverse=True)
    best = min(
        max(
            padded_cost(in_order[start:end])
            for start, end in itertools.pairwise((0, *cuts, len(in_order)))
        )
        for cuts in itertools.combinations(range(1, 9), 3)
    )
    assert max(costs_of(group_by_length(lengths, 4), lengths)) == best


def test_costs_rise_to_the_middle():
    costs = [5, 1, 4, 2, 3]
    assert [costs[index] for index in order_by_cost(costs)] == [1, 3, 5, 4, 2]


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_filled(seed):
    lengths = draws(40, seed=seed, highest=64)
    rows = pack(lengths, 64)
    fill = [sum(lengths[index] for index in row) for row in rows]
    assert sorted(itertools.chain(*rows)) == list(range(40))
    assert max(fill) <= 64
    assert all(a + b > 64 for a, b in itertools.combinations(fill, 2)), "two rows fit into one"
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 64) + 1


def test_best_fit_takes_the_fullest_row():
    assert pack([60, 50, 40, 4], 64) == [[0, 3], [1], [2]]
    assert pack([], 8) == []


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="65 tokens .*--max-token-num 64"):
        pack([3, 65], 64)


def test_more_rows_than_needed_are_filled_evenly():
    lengths = [10] * 12
    assert len(pack(lengths, 64)) == 2
    assert [len(row) for row in pack_into(lengths, 64, 4)] == [3, 3, 3, 3]
    assert pack_into([5], 64, 3) == [[0], [], []]
    # evenly filled, 3 + 3 + 3 leave no room of 5: the tight packing stays
    awkward = [5, 5, 3, 3, 2, 2]
    assert len(pack(awkward, 10)) == 2
    rows = pack_into(awkward, 10, 3)
    assert sorted(itertools.chain(*rows)) == list(range(6))
    assert max(sum(awkward[index] for index in row) for row in rows) <= 10
