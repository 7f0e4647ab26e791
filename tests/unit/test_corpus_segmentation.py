"""Segments against brute force: every cutting of short lists, a plain table for longer ones."""

import random
from itertools import combinations, product

import numpy

from stageline.corpus.cut import fewest


def _all_cuttings(lengths, limit):
    """Every list of ends whose segments fit, by number of segments."""
    places = range(1, len(lengths))
    for num_cuts in range(len(lengths)):
        found = [
            (*cuts, len(lengths))
            for cuts in combinations(places, num_cuts)
            if max(_pieces(lengths, (*cuts, len(lengths)))) <= limit
        ]
        if found:
            return found
    raise AssertionError("a unit does not fit")


def _pieces(lengths, ends):
    return [sum(lengths[a:b]) for a, b in zip((0, *ends), ends, strict=False)]


def _table(lengths, limit):
    """The number of segments, by the plain O(n^2) recurrence."""
    best = [0]
    for end in range(1, len(lengths) + 1):
        ways, total = [], 0
        for start in range(end - 1, -1, -1):
            total += lengths[start]
            if total > limit:
                break
            ways.append(best[start] + 1)
        best.append(min(ways))
    return best[-1]


def test_the_fewest_and_the_longest_of_all_cuttings():
    """Of those with the fewest segments: the longest first one, then the longest second one ..."""
    for limit in (3, 4, 5, 7):
        for num_units in range(1, 7):
            for lengths in product((1, 2, 3), repeat=num_units):
                longest = max(_all_cuttings(lengths, limit))
                assert tuple(fewest(numpy.array(lengths), limit)) == longest


def test_longer_lists_agree_with_the_plain_table():
    dice = random.Random(0)
    for _ in range(1000):
        limit = dice.randint(1, 40)
        lengths = [dice.randint(1, limit) for _ in range(dice.randint(1, 100))]
        found = fewest(numpy.array(lengths), limit).tolist()
        assert max(_pieces(lengths, found)) <= limit and len(found) == _table(lengths, limit)


def test_a_segment_takes_all_that_fits():
    assert fewest(numpy.array([3, 3, 3, 3]), 9).tolist() == [3, 4]


def test_no_units_give_no_segments():
    assert fewest(numpy.array([], dtype=numpy.int64), 5).tolist() == []
