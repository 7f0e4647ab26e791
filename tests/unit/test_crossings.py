"""Stage boundaries of a pipeline that cross machines, against a count by hand."""

import pytest

from stageline.distributed.process_group import crossings, explain_placement


def machines(*sizes):
    return [machine for machine, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ((8,), 8, []),
        ((4, 4), 2, []),
        ((4, 4), 8, [(0, 3)]),
        ((4, 4, 4), 6, [(0, 3), (1, 1)]),
        ((4, 4, 4), 3, [(1, 0), (2, 1)]),
        ((2, 1, 3), 3, [(0, 1)]),
    ],
)
def test_the_borders_between_machines(sizes, num_ranks, expected):
    assert crossings(machines(*sizes), num_ranks=num_ranks) == expected


def test_the_numbers_of_machines_need_no_order():
    assert crossings([1, 1, 0, 0], num_ranks=4) == [(0, 1)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [
        ((4, 4), 2, ["no pipeline crosses machines"]),
        ((4, 4), 8, ["1 border (of ranks 3|4)"]),
        ((4, 4, 4), 3, ["warning: pipelines 1, 2 cross", "--nproc-per-node 3, or 1 or 2 or 4"]),
        # replica 1 has ranks 5 to 9 on three machines, the others are on two
        ((3, 3, 3, 3, 3), 5, ["warning: pipeline 1 cross", "3 or 6 ranks a pipeline"]),
    ],
)
def test_only_what_crosses_too_often_is_a_warning_with_a_cure(sizes, num_ranks, words):
    said = explain_placement(machines(*sizes), num_ranks=num_ranks)
    assert all(word in said for word in words)
    assert ("warning" in said) == ("warning" in words[0])
