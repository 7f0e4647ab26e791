"""Draws of rows, against the `datasets` library and by counting."""

from collections import Counter

import datasets
import numpy
import pytest

from stageline.data.rows.sets import check_mix, exactly, held_out, mixed
from stageline.errors import UserError

STRATEGY = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}


@pytest.mark.parametrize("mix", STRATEGY)
@pytest.mark.parametrize(
    ("lengths", "probabilities"),
    [
        ((5, 1, 4), None),
        ((7, 30, 4), [0.5, 0.25, 0.25]),
        ((900, 1300), [0.5, 0.5]),  # more than one batch of draws
    ],
)
def test_mixing_is_that_of_the_library(mix, lengths, probabilities):
    starts = numpy.cumsum([0, *lengths])
    sets = [
        datasets.Dataset.from_dict({"row": list(range(start, start + size))})
        for start, size in zip(starts, lengths, strict=False)
    ]
    expected = datasets.interleave_datasets(
        sets, probabilities=probabilities, seed=11, stopping_strategy=STRATEGY[mix]
    )["row"]
    assert mixed(lengths, mix, probabilities, seed=11).tolist() == list(expected)


def test_rates_are_those_asked_for_and_another_seed_draws_others():
    order = mixed((10_000, 10_000), "interleave_under", [0.8, 0.2], seed=0)
    share = (order < 10_000).mean()
    assert 0.78 < share < 0.82
    assert (
        order.tolist() != mixed((10_000, 10_000), "interleave_under", [0.8, 0.2], seed=1).tolist()
    )


def test_all_rows_of_each_set_come_one_after_the_other():
    assert mixed((2, 3), "concat", None, seed=0).tolist() == [0, 1, 2, 3, 4]
    assert mixed((3,), "interleave_over", None, seed=0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("num_rows", "wanted"), [(10, 4), (10, 37)])
def test_exactly_so_many_rows_each_once_before_any_twice(num_rows, wanted):
    rows = exactly(num_rows, wanted, seed=0, name="a").tolist()
    assert len(rows) == wanted
    assert len(set(rows[:num_rows])) == min(num_rows, wanted)
    counts = Counter(rows)
    assert set(counts) <= set(range(num_rows)) and len(counts) == min(num_rows, wanted)
    assert rows == exactly(num_rows, wanted, seed=0, name="a").tolist()
    assert rows != exactly(num_rows, wanted, seed=1, name="a").tolist()
    assert rows != exactly(num_rows, wanted, seed=0, name="b").tolist(), "sets draw alike"


@pytest.mark.parametrize(("size", "count"), [(1, 1), (3, 3), (0.25, 2), (0.01, 1)])
def test_a_number_or_a_share_is_held_out(size, count):
    order = numpy.array([4, 0, 1, 1, 2, 3, 5, 6, 7, 0])  # 8 different rows
    held = held_out(order, size, seed=0)
    assert len(held) == len(set(held.tolist())) == count
    assert set(held.tolist()) <= set(order.tolist())
    assert held.tolist() == held_out(order[::-1], size, seed=0).tolist(), "order decides"


@pytest.mark.parametrize("size", [0, -1, 1.0, 8, 0.99])
def test_sizes_that_hold_out_nothing_or_all_are_refused(size):
    with pytest.raises(UserError, match="val_size"):
        held_out(numpy.arange(8), size, seed=0)


@pytest.mark.parametrize(
    ("mix", "num_sets", "probabilities", "words"),
    [
        ("concat", 2, [0.5, 0.5], "takes all rows of each set"),
        ("interleave_under", 1, [1.0], "1 sets are mixed"),
        ("interleave_under", 3, [0.5, 0.5], "3 sets are mixed"),
        ("interleave_under", 2, [0.0, 0.0], "add up to 0"),
        ("interleave_under", 2, [1.5, -0.5], "between 0 and 1"),
        ("interleave_under", 2, [float("nan"), 0.5], "between 0 and 1"),
        ("interleave_under", 2, [0.2, 0.2], "add up to 0.4"),
        ("interleave_over", 2, [1.0, 0.0], "would never end"),
    ],
)
def test_probabilities_that_mean_nothing_are_refused(mix, num_sets, probabilities, words):
    with pytest.raises(UserError, match=words):
        check_mix(mix, num_sets, probabilities)


def test_probabilities_of_thirds_are_taken():
    check_mix("interleave_over", 3, [0.33, 0.33, 0.33])
    assert len(mixed((5, 5, 5), "interleave_over", [0.33, 0.33, 0.33], seed=0)) >= 15
