"""The number of groups and the size of passes that measured steps advise: pure numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.inference.decoding.scheduler import (
    LEAST_TOKENS,
    WORTH_IT,
    GroupChoice,
    measure_steps,
)

ROWS = (1, 4, 16, 64)


def choice(step, *, together=1.0):
    """Two stages whose steps take `step(rows)` seconds; `together` times so long under load."""
    alone = tuple((step(rows), step(rows)) for rows in ROWS)
    loaded = tuple((a * together, b * together) for a, b in alone)
    return GroupChoice(ROWS, alone, loaded)


def bound_by_weights(rows):
    return 1.0


def bound_by_arithmetic(rows):
    return float(rows)


def both(rows):
    return 20.0 + rows


def test_stages_with_memory_of_their_own_always_gain_from_as_many_groups():
    assert choice(bound_by_weights).best(1) == 1, "one row makes one group"
    assert [choice(bound_by_arithmetic).best(rows) for rows in (2, 8, 64, 128)] == [2] * 4
    # on machines of their own, two groups take turns even where the weights bind
    assert choice(bound_by_weights).cycle(8, 2) == choice(bound_by_weights).cycle(8, 1)


def test_where_weights_bind_on_one_bus_one_group_is_best():
    found = choice(bound_by_weights, together=1.8)
    assert [found.best(rows) for rows in (1, 2, 16, 64)] == [1] * 4


def test_between_the_two_the_number_of_rows_decides():
    found = choice(both, together=1.3)
    assert [found.best(rows) for rows in (2, 8, 64, 256)] == [1, 1, 2, 2]
    # 64 rows: 2 x 84 in turn, or twice 52 x 1.3 side by side
    assert found.cycle(64, 1) == pytest.approx(168)
    assert found.cycle(64, 2) == pytest.approx(2 * 52 * 1.3)


def test_prompts_are_read_in_passes_that_keep_stages_busy():
    found = choice(both)
    assert found.pass_tokens(255) == 255, "few tokens go in one pass"
    # 2 x 532 for one pass, 3 x 276 for two, 4 x 191 for three, 5 x 148 for four: too little less
    assert found.pass_tokens(512) == 171
    sizes = [found.pass_tokens(tokens) for tokens in (256, 2048, 16384)]
    assert sizes == sorted(sizes) and 2048 / sizes[1] > 4
    assert all(size >= LEAST_TOKENS for size in sizes)


def test_longer_passes_are_on_a_line_through_all_that_was_measured():
    steps = ((20.0, 20.0), (84.0, 84.0), (84.0, 84.0))  # the one of 32 rows was disturbed
    found = GroupChoice((1, 32, 64), steps, steps)
    assert found.pass_tokens(1024) < 1024, "by the last two steps a pass would cost the same"


def test_prompts_are_read_in_one_pass_where_two_cost_more():
    assert choice(bound_by_weights).pass_tokens(512) == 512
    assert choice(both, together=1.8).pass_tokens(256) == 256, "stages share a bus"


def test_a_measurement_takes_the_steps_during_which_all_stages_worked():
    def measure(rows, count):
        if count == 1:
            return [[0.1 * rows, 0.2 * rows]]
        # stage 0 is alone in the first step, stage 1 in the last
        full = [[0.3 * rows, 0.4 * rows]] * (count - 2)
        return [[0.1 * rows, 9.0], *full, [9.0, 0.2 * rows]]

    *waits, found = measure_steps(measure, max_rows=3, num_stages=2)
    assert set(waits) == {None}, "other work may come between"
    assert found.rows == (1, 2, 3)
    assert found.alone[0] == (0.1, 0.2)
    assert found.alone[2] == (pytest.approx(0.3), pytest.approx(0.6))
    assert found.together[2] == (pytest.approx(0.9), pytest.approx(1.2))
    *_, found = measure_steps(measure, max_rows=1, num_stages=2)
    assert found.best(1) == 1


def simulated(choice, num_rows, num_groups, cycles=40):
    """Seconds a cycle, from the times at which each stage takes up and ends each step."""
    steps = choice._steps(choice.together, -(-num_rows // num_groups))
    free = [0.0] * len(steps)
    ready = [0.0] * num_groups  # when a group's last step came out of the last stage
    for _ in range(cycles):
        for group in range(num_groups):
            now = ready[group]
            for stage, seconds in enumerate(steps):
                now = free[stage] = max(now, free[stage]) + seconds
            ready[group] = now
    return max(ready) / cycles


seconds = st.floats(1e-4, 1.0)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_rows=st.integers(1, 100))
def test_the_best_of_all_numbers_but_for_what_is_not_worth_it(data, num_stages, num_rows):
    tables = st.lists(st.tuples(*[seconds] * num_stages), min_size=4, max_size=4)
    found = GroupChoice(ROWS, tuple(data.draw(tables)), tuple(data.draw(tables)))
    best = found.best(num_rows)
    possible = range(1, min(2 * num_stages, num_rows) + 1)
    cycles = {number: found.cycle(num_rows, number) for number in possible}
    assert best in cycles
    least = min(cycles.values())
    assert cycles[best] * WORTH_IT <= least
    assert all(cycles[number] * WORTH_IT > least for number in possible if number < best)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_groups=st.integers(1, 8))
def test_a_cycle_is_what_simulated_stages_take(data, num_stages, num_groups):
    steps = data.draw(st.tuples(*[seconds] * num_stages))
    found = GroupChoice((1, 64), (steps, steps), (steps, steps))
    cycle = found.cycle(num_groups, num_groups)
    assert simulated(found, num_groups, num_groups) == pytest.approx(cycle, rel=0.2)
    assert simulated(found, num_groups, num_groups) >= cycle * 0.999
