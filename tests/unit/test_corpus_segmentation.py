"""Segments against brute force: every cutting of short lists, a plain table for longer ones."""

from itertools import combinations

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

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


def _case(raw):
    limit = 1 + raw[0] % 40
    return [1 + byte % limit for byte in raw[1:]], limit


def _cases(num, most):
    """Several cases at once, from some bytes: an example costs more than what is tested of it."""
    some = st.binary(min_size=2 * num, max_size=(1 + most) * num)
    return some.map(lambda raw: [_case(raw[start::num]) for start in range(num)])


@settings(max_examples=2_500, deadline=None, database=None, derandomize=True)
@given(_cases(4, most=8))
def test_the_fewest_and_the_longest_of_all_cuttings_10_000_times(cases):
    for lengths, limit in cases:
        # of those with the fewest segments: the longest first one, then the longest second one ...
        assert tuple(fewest(numpy.array(lengths), limit)) == max(_all_cuttings(lengths, limit))


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(_cases(4, most=100))
def test_longer_lists_agree_with_the_plain_table(cases):
    for lengths, limit in cases:
        found = fewest(numpy.array(lengths), limit).tolist()
        assert max(_pieces(lengths, found)) <= limit and len(found) == _table(lengths, limit)


def test_a_segment_takes_all_that_fits():
    assert fewest(numpy.array([3, 3, 3, 3]), 9).tolist() == [3, 4]


def test_no_units_give_no_segments():
    assert fewest(numpy.array([], dtype=numpy.int64), 5).tolist() == []
