"""The number of groups and the size of passes that measured steps advise: pure numbers."""

import pytest

from stageline.inference.decoding.group_choice import GroupChoice, measure_steps

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
    assert found.pass_tokens(40) == 40, "few tokens go in one pass"
    sizes = [found.pass_tokens(tokens) for tokens in (256, 2048, 16384)]
    assert sizes == sorted(sizes) and sizes[0] >= 64
    assert 2048 / sizes[1] > 4
    assert choice(bound_by_weights).pass_tokens(512) == 512


def test_a_measurement_takes_the_steps_during_which_all_stages_worked():
    def measure(rows, count):
        if count == 1:
            return [[0.1 * rows, 0.2 * rows]]
        # stage 0 is alone in the first step, stage 1 in the last
        return [[0.01, 9.0], *[[0.3 * rows, 0.4 * rows]] * (count - 2), [9.0, 0.01]]

    found = measure_steps(measure, max_rows=3, num_stages=2)
    assert found.rows == (1, 3)
    assert found.alone == ((0.1, 0.2), (pytest.approx(0.3), pytest.approx(0.6)))
    assert found.together[1] == (pytest.approx(0.9), pytest.approx(1.2))
    assert measure_steps(measure, max_rows=1, num_stages=2).best(1) == 1
