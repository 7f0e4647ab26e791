"""Computed permutations, against one written again with plain integers, and against chance."""

import itertools
import math

import numpy
import pytest

from stageline.corpus.mixture import permute

_MASK = 2**64 - 1


def _order(size, seed):
    """An order of 0 .. size - 1: places -> numbers."""
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


@pytest.mark.parametrize("size", [*range(1, 40), 1000, 4096, 4097, 99_991])
def test_every_number_comes_once(size):
    numbers = _order(size, seed=size)(numpy.arange(size))
    assert numbers.dtype == numpy.int64
    assert sorted(numbers.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 7, 100, 12_345, 10**9, 10**9 + 7, 3 * 10**12])
def test_numbers_are_those_of_plain_integers(size):
    places = numpy.unique(numpy.linspace(0, size - 1, 60).astype(numpy.int64))
    for seed in (0, 1, 2**63 - 1):
        expected = [_plain(int(place), size, seed) for place in places]
        assert _order(size, seed)(places).tolist() == expected


def test_the_orders_stay_what_they_are():
    """A run that goes on under a later version has to find the same rows."""
    places = numpy.arange(10)
    assert _order(10, 0)(places).tolist() == [7, 2, 1, 9, 0, 4, 6, 5, 3, 8]
    assert _order(10**9, 42)(places[:4]).tolist() == [980652175, 710845813, 898945358, 592274561]


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
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
