"""Which borders of a pipeline lie between machines, against a count by hand."""

import pytest

from stageline.distributed.process_group import crossings, explain_placement


def machines(*sizes):
    return [machine for machine, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ((8,), 8, []),
        ((4, 4), 4, []),
        ((4, 4), 2, []),
        ((2, 2), 1, []),
        ((4, 4), 8, [(0, 3)]),
        ((1, 1), 2, [(0, 0)]),
        ((4, 4, 4), 6, [(0, 3), (1, 1)]),
        ((4, 4, 4), 3, [(1, 0), (2, 1)]),
        ((2, 1, 3), 3, [(0, 1)]),
    ],
)
def test_the_borders_between_machines(sizes, num_ranks, expected):
    assert crossings(machines(*sizes), num_ranks=num_ranks) == expected


def test_the_numbers_of_machines_need_no_order():
    assert crossings([1, 1, 0, 0], num_ranks=4) == [(0, 1)]


def test_a_pipeline_that_fits_on_a_machine_is_no_subject():
    said = explain_placement(machines(4, 4), num_ranks=2)
    assert said == (
        "2 machines, up to 4 processes each; 4 pipelines of 2 ranks: no pipeline crosses machines."
    )


def test_what_must_cross_is_said_without_a_warning():
    said = explain_placement(machines(4, 4), num_ranks=8)
    assert "between machines: 1 border (of ranks 3|4)." in said and "warning" not in said


def test_replicas_that_straddle_machines_are_a_warning_with_a_cure():
    said = explain_placement(machines(4, 4, 4), num_ranks=3)
    assert "warning: pipelines 1, 2 cross machines more often than 3 ranks need" in said
    assert "--nproc-per-node 3, or 1 or 2 or 4 ranks a pipeline" in said


def test_a_long_pipeline_that_crosses_once_too_often_is_a_warning_with_a_cure():
    said = explain_placement(machines(3, 3, 3, 3, 3), num_ranks=5)
    # replica 1 holds ranks 5 to 9 on three machines, the others lie on two
    assert "warning: pipeline 1 cross" in said and "3 or 6 ranks a pipeline" in said
