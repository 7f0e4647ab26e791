"""Half precision: masters, gradient sums and loss scaling against plain float32 arithmetic."""

import torch
from torch import nn

from stageline.training.precision import LossScaler, MasterWeights


def test_small_gradients_add_up_in_float32():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weights = MasterWeights({"w": parameter})
    for value in [1.0] + [2.0**-9] * 256:  # each is lost when added to 1 in bfloat16
        (parameter * value).sum().backward()
    assert parameter.grad is None
    assert weights.parameters["w"].grad.item() == 1.5


def test_gradients_are_forgotten_on_both_sides():
    half, full = nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1))
    weights = MasterWeights({"half": half, "full": full})
    for _ in range(2):
        weights.zero_grad()
        (half * 3 + full * 5).sum().backward()
        assert weights.parameters["half"].grad.item() == 3.0
        assert weights.parameters["full"].grad.item() == 5.0


def test_small_updates_add_up_in_the_master():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weights = MasterWeights({"w": parameter})
    optimizer = torch.optim.SGD(weights.parameters.values(), lr=1.0)
    for _ in range(64):
        weights.parameters["w"].grad = torch.full((1,), -(2.0**-10))
        optimizer.step()
        weights.write_back()
    assert weights.parameters["w"].item() == 1.0625
    assert parameter.item() == 1.0625


def test_float32_parameters_are_their_own_masters():
    parameter = nn.Parameter(torch.ones(1))
    assert MasterWeights({"w": parameter}).parameters["w"] is parameter


def test_the_scale_halves_and_doubles():
    scaler = LossScaler(enabled=True, initial_scale=8.0, growth_interval=2)
    scaler.update(overflowed=True)
    assert scaler.scale == 4.0
    scaler.update(overflowed=False)
    scaler.update(overflowed=False)
    assert scaler.scale == 8.0
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 16.0)
    scaler.unscale({"w": parameter})
    assert parameter.grad.item() == 2.0
    restored = LossScaler(enabled=True)
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()


def test_an_overflow_starts_the_count_of_good_steps_anew():
    scaler = LossScaler(enabled=True, initial_scale=8.0, growth_interval=2)
    scales = []
    for overflowed in (False, True, False, True, False, False):
        scaler.update(overflowed=overflowed)
        scales.append(scaler.scale)
    assert scales == [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]


def test_the_scale_never_makes_a_loss_smaller():
    scaler = LossScaler(enabled=True, initial_scale=2.0)
    for _ in range(3):
        scaler.update(overflowed=True)
    assert scaler.scale == 1.0


def test_without_scaling_nothing_changes():
    scaler = LossScaler(enabled=False)
    scaler.update(overflowed=True)
    assert scaler.scale == 1.0
