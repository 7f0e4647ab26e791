"""The number of groups against a search through all of them, and against simulated stages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.inference.decoding.group_choice import WORTH_IT, GroupChoice, measure_steps

ROWS = (1, 2, 4, 8, 16, 32, 64)


def choice_of(step, num_stages, rows=ROWS):
    """Stages that all take `step(rows)` seconds."""
    return GroupChoice(rows, tuple((step(number),) * num_stages for number in rows))


def simulated(choice, num_rows, num_groups, cycles=40):
    """Seconds a cycle, from the times at which each stage takes up and ends each step."""
    steps = choice._steps(-(-num_rows // num_groups))
    free = [0.0] * len(steps)
    ready = [0.0] * num_groups  # when a group's last step came out of the last stage
    for _ in range(cycles):
        for group in range(num_groups):
            now = ready[group]
            for stage, seconds in enumerate(steps):
                now = free[stage] = max(now, free[stage]) + seconds
            ready[group] = now
    return max(ready) / cycles


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_steps_bound_by_reading_weights_are_best_in_one_group(num_stages):
    choice = choice_of(lambda rows: 0.01, num_stages)
    assert [choice.best(rows) for rows in (1, 2, 5, 16, 64)] == [1] * 5


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_steps_bound_by_arithmetic_are_best_in_as_many_groups_as_stages(num_stages):
    choice = choice_of(lambda rows: 0.001 * rows, num_stages)
    assert choice.best(16 * num_stages) == num_stages
    assert choice.best(num_stages) == num_stages
    assert choice.best(1) == 1, "one sequence can't be divided"


seconds = st.floats(1e-4, 1.0)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_rows=st.integers(1, 100))
def test_the_best_of_all_numbers_but_for_what_is_not_worth_it(data, num_stages, num_rows):
    table = data.draw(
        st.lists(st.tuples(*[seconds] * num_stages), min_size=len(ROWS), max_size=len(ROWS))
    )
    choice = GroupChoice(ROWS, tuple(table))
    best = choice.best(num_rows)
    possible = range(1, min(2 * num_stages, num_rows) + 1)
    cycles = {number: choice.cycle(num_rows, number) for number in possible}
    assert best in cycles
    assert cycles[best] <= min(cycles.values()) / WORTH_IT
    assert all(cycles[best] < WORTH_IT * cycles[number] for number in possible if number < best)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_groups=st.integers(1, 8))
def test_a_cycle_is_what_simulated_stages_take(data, num_stages, num_groups):
    steps = data.draw(st.tuples(*[seconds] * num_stages))
    choice = GroupChoice((1, 64), (steps, steps))
    found = choice.cycle(num_groups, num_groups)
    assert simulated(choice, num_groups, num_groups) == pytest.approx(found, rel=0.2)
    assert simulated(choice, num_groups, num_groups) >= found * 0.999


def test_between_measured_numbers_lies_a_line():
    choice = GroupChoice((1, 4), ((1.0, 2.0), (4.0, 2.0)))
    assert choice.cycle(2, 1) == pytest.approx(2.0 + 2.0)
    assert choice.cycle(4, 1) == pytest.approx(6.0)
    assert choice.cycle(8, 1) == pytest.approx(12.0), "beyond the largest in proportion"
    assert choice.cycle(8, 2) == pytest.approx(8.0), "two groups of four, the first stage works"


def test_measurements_take_the_shortest_behind_one_that_warms_up():
    asked, found = [], iter([9.0, 3.0, 1.0, 2.0] * 4)

    def measure(num_rows):
        asked.append(num_rows)
        return [next(found), 0.5]

    choice = measure_steps(measure, max_rows=6)
    assert asked == [1] * 4 + [2] * 4 + [4] * 4 + [6] * 4
    assert choice.rows == (1, 2, 4, 6)
    assert choice.seconds == ((1.0, 0.5),) * 4
