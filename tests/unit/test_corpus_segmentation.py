"""Segments against brute force: every cutting of short lists, a plain table for longer ones."""

from itertools import combinations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus.segmentation import even, fewest


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


def _squares(lengths, ends):
    return sum(piece * piece for piece in _pieces(lengths, ends))


def _table(lengths, limit):
    """(fewest segments, least sum of squares among those), by the plain O(n^2) recurrence."""
    best = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        ways, total = [], 0
        for start in range(end - 1, -1, -1):
            total += lengths[start]
            if total > limit:
                break
            ways.append((best[start][0] + 1, best[start][1] + total * total))
        best.append(min(ways))
    return best[-1]


@st.composite
def _units(draw, most):
    limit = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, limit), min_size=1, max_size=most))
    return lengths, limit


@settings(max_examples=10_000, deadline=None, database=None, derandomize=True)
@given(_units(9))
def test_the_fewest_and_the_most_even_of_all_cuttings(case):
    lengths, limit = case
    cuttings = _all_cuttings(lengths, limit)
    least = min(_squares(lengths, ends) for ends in cuttings)
    best = [ends for ends in cuttings if _squares(lengths, ends) == least]
    assert len(fewest(numpy.array(lengths), limit)) == len(cuttings[0])
    assert tuple(even(numpy.array(lengths), limit)) == max(best)
    assert max(best) == tuple(max(cuts) for cuts in zip(*best, strict=True))  # the rule for ties


@settings(max_examples=1_000, deadline=None, database=None, derandomize=True)
@given(_units(120))
def test_longer_lists_agree_with_the_plain_table(case):
    lengths, limit = case
    found = even(numpy.array(lengths), limit).tolist()
    assert max(_pieces(lengths, found)) <= limit
    assert (len(found), _squares(lengths, found)) == _table(lengths, limit)
    greedy = fewest(numpy.array(lengths), limit).tolist()
    assert max(_pieces(lengths, greedy)) <= limit and len(greedy) == len(found)


@pytest.mark.parametrize(("longest", "limit"), [(3, 64), (25, 256), (200, 256), (1, 30)])
def test_documents_of_many_segments_agree_with_the_plain_table(longest, limit):
    lengths = numpy.random.default_rng(longest).integers(1, longest + 1, size=6_000)
    found = even(lengths, limit).tolist()
    assert max(_pieces(lengths.tolist(), found)) <= limit
    assert (len(found), _squares(lengths.tolist(), found)) == _table(lengths.tolist(), limit)


def test_a_greedy_segment_takes_all_that_fits():
    assert fewest(numpy.array([3, 3, 3, 3]), 9).tolist() == [3, 4]
    assert even(numpy.array([3, 3, 3, 3]), 9).tolist() == [2, 4]


@pytest.mark.parametrize("cut", [fewest, even])
def test_no_units_give_no_segments(cut):
    assert cut(numpy.array([], dtype=numpy.int64), 5).tolist() == []


def test_of_equally_even_cuttings_the_latest_cuts_are_taken():
    assert even(numpy.array([1, 1, 1]), 2).tolist() == [2, 3]
    assert even(numpy.array([1, 2, 2, 1, 2]), 4).tolist() == [2, 4, 5]
