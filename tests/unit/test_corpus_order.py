"""Computed permutations, against one written again with plain integers, and against chance."""

import itertools
import math
import tracemalloc

import numpy
import pytest

from stageline.corpus.mixture import permute

_MASK = 2**64 - 1


def _order(size, seed):
    """Return an order of 0 .. size - 1: places -> numbers."""
    return lambda places: permute(places, numpy.array([size]), numpy.array([seed]))


def _hash(value):
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def _plain(place, size, seed):
    width = math.isqrt(size - 1) + 1
    width += width % 2
    height = -(-size // width)
    while True:
        left, right = divmod(place, height)
        for turn in range(1, 17):
            key = _hash(seed) ^ turn * 0x9E3779B97F4A7C15 & _MASK
            if turn % 2:
                left = (left + _hash((right + key) & _MASK)) % width
            else:
                right = (right + _hash((left + key) & _MASK)) % height
        place = left * height + right
        if place < size:
            return place


def test_every_number_comes_once():
    for size in (*range(1, 40), 1000, 4096, 4097, 99_991):
        numbers = _order(size, seed=size)(numpy.arange(size))
        assert numbers.dtype == numpy.int64
        assert sorted(numbers.tolist()) == list(range(size)), size


@pytest.mark.parametrize("size", [1, 7, 12_345, 10**9 + 7, 3 * 10**12])
def test_numbers_are_those_of_plain_integers(size):
    places = numpy.unique(numpy.linspace(0, size - 1, 60).astype(numpy.int64))
    for seed in (0, 1, 2**63 - 1):
        expected = [_plain(int(place), size, seed) for place in places]
        assert _order(size, seed)(places).tolist() == expected


def test_the_orders_stay_what_they_are():
    """Keep the orders: a run that resumes under a later version must find the same rows."""
    places = numpy.arange(10)
    assert _order(10, 0)(places).tolist() == [7, 2, 1, 9, 0, 4, 6, 5, 3, 8]
    assert _order(10**9, 42)(places[:4]).tolist() == [
        980652175,
        710845813,
        898945358,
        592274561,
    ]


def test_many_orders_in_one_call_are_those_of_each():
    sizes, seeds = numpy.array([5, 17, 5, 1000]), numpy.array([1, 2, 3, 4])
    parts = [_order(int(size), int(seed)) for size, seed in zip(sizes, seeds, strict=True)]
    expected = numpy.concatenate(
        [part(numpy.arange(size)) for part, size in zip(parts, sizes, strict=True)]
    )
    places = numpy.concatenate([numpy.arange(size) for size in sizes])
    got = permute(places, numpy.repeat(sizes, sizes), numpy.repeat(seeds, sizes))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [3, 4, 6])
def test_all_orders_of_a_few_things_are_equally_likely(size):
    num_orders = math.factorial(size)
    num_seeds = max(12_000, 20 * num_orders)
    seeds = numpy.repeat(numpy.arange(num_seeds) * 7919 + 5, size)
    places = numpy.tile(numpy.arange(size), num_seeds)
    drawn = permute(places, numpy.full(len(places), size), seeds).reshape(-1, size)
    codes = dict.fromkeys(itertools.permutations(range(size)), 0)
    orders, times = numpy.unique(drawn, axis=0, return_counts=True)
    codes.update(zip(map(tuple, orders.tolist()), times.tolist(), strict=True))
    mean = num_seeds / num_orders
    chi_square = sum((count - mean) ** 2 / mean for count in codes.values())
    freedom = num_orders - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_numbers_spread_and_neighbours_are_unrelated():
    size, count = 10**9, 100_000
    numbers = _order(size, seed=11)(numpy.arange(count))
    in_bins = numpy.bincount(numbers * 100 // size, minlength=100)
    chi_square = ((in_bins - count / 100) ** 2 / (count / 100)).sum()
    assert 99 - 5 * math.sqrt(198) < chi_square < 99 + 5 * math.sqrt(198)
    assert abs(numpy.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(count)
    # the low bits too: rows next to each other in the files are often of one source
    chi_square = ((numpy.bincount(numbers % 16) - count / 16) ** 2 / (count / 16)).sum()
    assert chi_square < 15 + 5 * math.sqrt(30)


def test_seeds_next_to_each_other_give_unrelated_orders():
    places = numpy.arange(10_000)
    first, second = (_order(10_000, seed)(places) for seed in (5, 6))
    assert abs(numpy.corrcoef(first, second)[0, 1]) < 0.05
    assert (first == second).sum() < 10


def test_a_place_among_billions_takes_no_memory():
    order = _order(2 * 10**9, seed=1)
    places = numpy.arange(10**9, 10**9 + 64)
    tracemalloc.start()
    order(places)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_place_outside_is_our_own_mistake():
    with pytest.raises(AssertionError):
        _order(3, 0)(numpy.array([3]))
