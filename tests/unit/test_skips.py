"""Steps that are skipped, counted and refused; and stages without gradients."""

import json
import math
from statistics import mean, pstdev

import pytest

from stageline.errors import NonFiniteError
from stageline.training.grad_norm import Owner, stages_without_gradient
from stageline.training.nonfinite import SPIKE_LEAST, SPIKE_WINDOW, Skips


@pytest.mark.parametrize(("place", "bad"), enumerate([math.nan, math.inf, -math.inf]))
def test_any_figure_that_is_no_number_skips(bad, place):
    figures = [1.0, 0.0, 2.0]
    figures[place] = bad
    verdict = Skips().judge(*figures)
    assert verdict.is_skipped and not verdict.is_finite
    assert ("loss", "router loss", "gradient norm")[place] in verdict.problem
    assert str(bad) in verdict.problem


def test_counts_and_stops():
    skips = Skips(max_in_a_row=2)
    for norm in (1.0, math.nan, 1.0, math.nan, math.nan):
        skips.judge(1.0, 0.0, norm)
        assert skips.in_a_row < 2 or norm != 1.0
        if skips.in_a_row < 2:
            skips.check("why", step=1)
    assert (skips.total, skips.in_a_row) == (3, 2)
    with pytest.raises(NonFiniteError, match="2 steps in a row up to step 5 .* because why"):
        skips.check("why", step=5)
    assert NonFiniteError.exit_code == 6


def test_a_spike_is_measured_by_the_last_losses_alone():
    skips = Skips(spike_sigma=3)
    losses = [100.0] * 10 + [2 + 0.1 * math.sin(step) for step in range(SPIKE_WINDOW)]
    for loss in losses:
        assert skips.judge(loss, 0.0, 1.0).problem is None
    window = losses[-SPIKE_WINDOW:]
    limit = mean(window) + 3 * pstdev(window)
    state = json.dumps(skips.state_dict())
    for loss, is_spike in ((limit - 1e-3, False), (limit + 1e-3, True), (0.0, False)):
        skips.load_state_dict(json.loads(state))
        verdict = skips.judge(loss, 0.0, 1.0)
        assert (verdict.problem is not None) == is_spike
        assert not verdict.is_skipped and verdict.is_finite, "warned about, no more"


def test_no_spike_before_there_are_losses_to_compare_with():
    skips = Skips(spike_sigma=3, spike_action="skip")
    for _ in range(SPIKE_LEAST - 1):
        assert not skips.judge(1.0, 0.0, 1.0).is_skipped
    assert not skips.judge(50.0, 0.0, 1.0).is_skipped
    skips = Skips(spike_sigma=3, spike_action="skip")
    for step in range(SPIKE_LEAST):
        skips.judge(1.0 + step % 2, 0.0, 1.0)
    assert skips.judge(50.0, 0.0, 1.0).is_skipped


def test_a_level_that_lasts_is_no_spike_for_long():
    skips = Skips(spike_sigma=3, spike_action="skip")
    for step in range(SPIKE_WINDOW):
        skips.judge(1.0 + 0.1 * (step % 2), 0.0, 1.0)
    skipped = [skips.judge(5.0, 0.0, 1.0).is_skipped for _ in range(20)]
    assert skipped[0] and not skipped[-1]


def test_stages_whose_gradients_are_zero_or_missing():
    owners = [Owner("a", 0, 0), Owner("b", 0, 0), Owner("c", 1, 1), Owner("d", 1, 2)]
    assert stages_without_gradient([0.0, 1.0, 0.0, -1.0], owners) == [1, 2]
    assert stages_without_gradient([0.0, 1e-30, math.nan, math.inf], owners) == []
    assert stages_without_gradient([0.0, -1.0, 1.0, 1.0], owners) == [0]
