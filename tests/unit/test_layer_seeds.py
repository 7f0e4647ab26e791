"""Random draws in, between and after layers, by a model that records its draws."""

import random

import numpy
import pytest
import torch
from torch import nn

from stageline.errors import UserError
from stageline.modules.layer_seeds import LayerSeeds
from tests.helpers.fake_devices import fake_accelerators

NUM_LAYERS = 4


class Layer(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn

    def forward(self, x):
        self.drawn.append(torch.rand(()).item())
        return x


class Stage(nn.Module):
    """Draws before its layers, in each, between and behind them; as many as `extra` in each."""

    def __init__(self, layers, extra=0):
        super().__init__()
        self.layers = layers
        self.drawn = {}
        self.inside = [self.drawn.setdefault(("in", index), []) for index in range(NUM_LAYERS)]
        self.all = nn.ModuleList(Layer(drawn) for drawn in self.inside)
        self.extra = extra

    def layer_list(self):
        return list(enumerate(self.all))

    def forward(self, x):
        for index in self.layers:
            self.drawn["before", index] = torch.rand(1 + self.extra)[0].item()
            x = self.all[index](x)
        self.drawn["before", self.layers.stop] = torch.rand(()).item()
        return x


class Own(Stage):
    """Does not say which layers it has."""

    def layer_list(self):
        raise UserError("override it")


def draws_of(stage, *, seed=3, step=5, first=0, micro_batch=1):
    seeds = LayerSeeds([stage], seed=seed)
    seeds.begin(step, first_micro_batch=first)
    seeds.start(stage, micro_batch)
    stage(torch.zeros(()))
    return stage.drawn


def test_a_cut_changes_no_draw_in_between_or_behind():
    whole = draws_of(Stage(range(NUM_LAYERS)))
    values = [str(value) for value in whole.values()]
    assert len(set(values)) == len(values) == 2 * NUM_LAYERS + 1
    for layers in (range(2), range(2, 4), range(1, 2), range(4, 4)):
        for place, value in draws_of(Stage(layers)).items():
            if value:
                assert value == whole[place], (layers, place)
    # how much was drawn before does not matter either
    assert draws_of(Stage(range(NUM_LAYERS), extra=5))["in", 2] == whole["in", 2]


def test_seed_step_and_micro_batch_matter_and_the_replica_does_not():
    usual = draws_of(Stage(range(NUM_LAYERS)))
    for change in ({"seed": 4}, {"step": 6}, {"micro_batch": 2}):
        assert draws_of(Stage(range(NUM_LAYERS)), **change)["in", 0] != usual["in", 0]
    joined = draws_of(Stage(range(NUM_LAYERS)), first=1, micro_batch=0)
    assert joined == usual


def test_stages_that_do_not_name_their_layers_have_starts_of_their_own():
    starts = [draws_of(Own(range(first, first + 1)))["before", first] for first in (0, 1, 2)]
    assert len(set(starts)) == 3


def draw():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@pytest.mark.parametrize("how", ["no seed", "evaluation", "outside of a step", "after the end"])
def test_generators_are_left_alone(how):
    stage = Stage(range(NUM_LAYERS))
    seeds = LayerSeeds([stage], seed=None if how == "no seed" else 1)
    if how != "outside of a step":
        seeds.begin(0)
    if how == "after the end":
        seeds.end()
    stage.train(how != "evaluation")
    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(0)
    seeds.start(stage, 0)
    seeds.start_loss()
    stage(torch.zeros(()))
    values = [stage.drawn["before", 0], stage.inside[0][0], stage.drawn["before", 1]]
    assert values == expected


def test_behind_a_step_nothing_is_seeded():
    stage = Stage(range(NUM_LAYERS))
    seeds = LayerSeeds([stage], seed=1)
    seeds.begin(0)
    seeds.start(stage, 0)
    seeds.end()
    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(2)]
    torch.manual_seed(0)
    seeds.start_loss()
    stage(torch.zeros(()))  # a caller that knows nothing of seeds runs the stage like this
    assert [stage.drawn["before", 0], stage.inside[0][0]] == expected


def test_loss_and_update_draw_the_same_whatever_was_drawn_before():
    found = []
    for layers in (range(NUM_LAYERS), range(3, 4)):
        stage = Stage(layers)
        seeds = LayerSeeds([stage], seed=1)
        seeds.begin(2)
        seeds.start(stage, 0)
        stage(torch.zeros(()))
        draw()
        seeds.start_loss()
        loss = draw()
        seeds.end()
        found.append((loss, draw()))
    assert found[0] == found[1] and found[0][0] != found[0][1]


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_every_device_draws_alike(monkeypatch, kind):
    """One GPU may recompute what another drew in a forward pass."""
    cards = tuple(torch.Generator() for _ in range(3))
    devices = fake_accelerators(monkeypatch, kind, 2, init=lambda: None, default_generators=cards)
    stage = Stage(range(NUM_LAYERS))
    drawn = []

    def draw(*_):
        drawn.append([torch.rand((), generator=card).item() for card in cards])

    stage.all[2].forward = lambda x: draw() or x
    seeds = LayerSeeds([stage], seed=3, devices=devices)
    seeds.begin(5)
    seeds.start(stage, 1)
    draw()
    stage(torch.zeros(()))
    for first, second, other in drawn:
        assert first == second != other
    assert drawn[0][0] != drawn[1][0]
