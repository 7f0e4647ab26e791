"""Segments against brute force: every cutting of short lists, a plain table for longer ones."""

from itertools import combinations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus import cut as segmentation
from stageline.corpus.cut import even, fewest


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


def _case(raw):
    limit = 1 + raw[0] % 40
    return [1 + byte % limit for byte in raw[1:]], limit


def _cases(num, most):
    """Several cases at once, from some bytes: an example costs more than what is tested of it."""
    some = st.binary(min_size=2 * num, max_size=(1 + most) * num)
    return some.map(lambda raw: [_case(raw[start::num]) for start in range(num)])


@settings(max_examples=2_500, deadline=None, database=None, derandomize=True)
@given(_cases(4, most=8))
def test_the_fewest_and_the_most_even_of_all_cuttings_10_000_times(cases):
    for lengths, limit in cases:
        cuttings = _all_cuttings(lengths, limit)
        least = min(_squares(lengths, ends) for ends in cuttings)
        best = [ends for ends in cuttings if _squares(lengths, ends) == least]
        assert len(fewest(numpy.array(lengths), limit)) == len(cuttings[0])
        assert tuple(even(numpy.array(lengths), limit)) == max(best)
        # the rule for ties: of the best cuttings each cut is the latest
        assert max(best) == tuple(max(cuts) for cuts in zip(*best, strict=True))


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(_cases(4, most=100))
def test_longer_lists_agree_with_the_plain_table(cases):
    for lengths, limit in cases:
        found = even(numpy.array(lengths), limit).tolist()
        assert max(_pieces(lengths, found)) <= limit
        assert (len(found), _squares(lengths, found)) == _table(lengths, limit)
        greedy = fewest(numpy.array(lengths), limit).tolist()
        assert max(_pieces(lengths, greedy)) <= limit and len(greedy) == len(found)


@pytest.mark.parametrize(("longest", "limit"), [(3, 64), (25, 256), (200, 256), (1, 30)])
def test_documents_of_many_segments_agree_with_the_plain_table(longest, limit):
    for num_units in (60, 600, 6_000):
        lengths = numpy.random.default_rng(num_units).integers(1, longest + 1, size=num_units)
        found = even(lengths, limit).tolist()
        assert max(_pieces(lengths.tolist(), found)) <= limit
        assert (len(found), _squares(lengths.tolist(), found)) == _table(lengths.tolist(), limit)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(1, 5), st.integers(5, 20))
def test_single_tokens_between_longer_ends_agree_with_the_plain_table(first, inner, last, limit):
    lengths = [first, *[1] * inner, last]
    found = even(numpy.array(lengths), limit).tolist()
    assert max(_pieces(lengths, found)) <= limit
    assert (len(found), _squares(lengths, found)) == _table(lengths, limit)


def test_a_greedy_segment_takes_all_that_fits():
    assert fewest(numpy.array([3, 3, 3, 3]), 9).tolist() == [3, 4]
    assert even(numpy.array([3, 3, 3, 3]), 9).tolist() == [2, 4]


@pytest.mark.parametrize("cut", [fewest, even])
def test_no_units_give_no_segments(cut):
    assert cut(numpy.array([], dtype=numpy.int64), 5).tolist() == []


def test_of_equally_even_cuttings_the_latest_cuts_are_taken():
    assert even(numpy.array([1, 1, 1]), 2).tolist() == [2, 3]
    assert even(numpy.array([1, 2, 2, 1, 2]), 4).tolist() == [2, 4, 5]


def test_a_huge_document_is_evened_by_stretches(monkeypatch):
    draw = numpy.random.default_rng(4)
    for limit in (64, 70):
        lengths = draw.integers(1, 9, 4000)
        exact = even(lengths, limit)
        with monkeypatch.context() as patch:
            patch.setattr(segmentation, "MOST_AT_ONCE", 50)
            found = even(lengths, limit)
        assert len(found) == len(exact) == len(fewest(lengths, limit)) > 200

        def pieces(ends, lengths=lengths):
            return numpy.diff(numpy.concatenate([[0], lengths.cumsum()])[[0, *ends]])

        assert pieces(found).max() <= limit and pieces(found).sum() == lengths.sum()
        assert pieces(found).std() <= pieces(exact).std() * 1.5
        assert pieces(found).std() < pieces(fewest(lengths, limit)).std()
