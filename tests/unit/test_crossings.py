"""Pipelines that cross machines."""

import pytest

from stageline.distributed.process_group import explain_placement


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [
        ((8,), 8, "1 machines, 1 pipelines of 8 ranks: no pipeline crosses machines"),
        ((4, 4), 2, "2 machines, 4 pipelines of 2 ranks: no pipeline crosses machines"),
        ((4, 4), 8, "pipelines 0 cross"),
        ((4, 4, 4), 3, "pipelines 1, 2 cross"),
        ((2, 1, 3), 3, "pipelines 0 cross"),
    ],
)
def test_the_pipelines_that_cross_machines_are_named(sizes, num_ranks, words):
    machines = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    assert words in explain_placement(machines, num_ranks=num_ranks)


def test_the_numbers_of_machines_need_no_order():
    assert "pipelines 0 cross" in explain_placement([1, 1, 0, 0], num_ranks=4)
