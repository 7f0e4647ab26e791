"""A wrapped model passes for the model: attributes, names, state, modes and hooks."""

import copy

import pytest
import torch
from torch import nn

from stageline.streaming import AutoRoundPipe, RoundPipe
from stageline.streaming.lanes import Lane

KINDS = ("row", "with an original", "auto")


class Model(nn.Module):
    """A module with settings, a buffer and a method of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.config = {"kind": "tiny"}
        self.factor = 3

    def forward(self, value):
        return self.last(self.norm(self.first(value)))

    def scaled(self, value):
        return value * self.factor


def make(kind):
    """Return (wrapper, models that attributes belong to)."""
    model = Model()
    lanes = [Lane.cpu()]
    if kind == "auto":
        model.first = RoundPipe(model.first, lanes=lanes)
        model.last = RoundPipe(model.last, lanes=lanes)
        return AutoRoundPipe(model), [model]
    if kind == "row":
        return RoundPipe(model, lanes=lanes), [model]
    row = nn.Sequential(model.first, model.norm, model.last)
    engine = RoundPipe(row, lanes=lanes)
    engine.set_original_model(model)
    return engine, [model, row]


@pytest.fixture(params=KINDS)
def pair(request):
    return make(request.param)


def train_step(wrapper, optimizer, *, is_async=False):
    wrapper(torch.randn(6, 4, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    wrapper.step(optimizer.step, is_async=is_async)


def test_attributes_are_those_of_the_original_model(pair):
    wrapper, models = pair
    assert wrapper.config is models[0].config and wrapper.norm is models[0].norm
    wrapper.factor = 7
    assert models[0].factor == 7 and wrapper.scaled(2) == 14
    assert not any("factor" in vars(other) for other in (wrapper, *models[1:]))
    with pytest.raises(AttributeError, match="neither (Auto)?RoundPipe nor its model has"):
        _ = wrapper.nothing_of_the_kind


def test_parameters_and_state_have_the_names_of_the_model(pair):
    wrapper, _ = pair
    plain = Model()
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in wrapper.named_parameters()] == names
    assert [name for name, _ in wrapper.named_buffers()] == [n for n, _ in plain.named_buffers()]
    state = wrapper.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "is_async"), [("row", True), ("with an original", False), ("auto", True)]
)
def test_what_is_loaded_is_what_the_optimizer_goes_on_from(kind, is_async):
    wrapper, (model, *_) = make(kind)
    optimizer = torch.optim.SGD(wrapper.optim_parameters(), lr=0.5)
    train_step(wrapper, optimizer, is_async=is_async)  # masters exist, a page may be due
    state = {name: torch.full_like(value, 0.25) for name, value in Model().state_dict().items()}
    assert str(wrapper.load_state_dict(state)) == "<All keys matched successfully>"
    wrapper.synchronize()  # the update of a step on the old weights does not return
    assert float(model.last.weight.detach().max()) == 0.25
    wrapper.step(optimizer.step, is_async=False)  # without a gradient: nothing moves
    wrapper.synchronize()
    for name, value in wrapper.state_dict().items():
        assert torch.equal(value, state[name]), name
    for master in wrapper.optim_parameters():
        assert torch.equal(master, torch.full_like(master, 0.25))
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapper.load_state_dict({"first.weight": state["first.weight"]})


def test_modes_reach_all_layers(pair):
    wrapper, models = pair
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    wrapper.eval()
    assert not wrapper.training and not any(model.training for model in models)
    counted = models[0].norm.num_batches_tracked.clone()
    with torch.no_grad():
        output = wrapper(batch)
    assert torch.equal(output, Model().eval()(batch))
    assert torch.equal(models[0].norm.num_batches_tracked, counted)
    wrapper.train()
    assert wrapper.training and models[0].norm.training


@pytest.mark.parametrize("to_none", [False, True])
def test_the_models_own_parameters_can_be_optimized(pair, to_none):
    wrapper, _ = pair
    plain = Model().eval()
    wrapper.eval()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapper, plain))
    for number in range(3):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        for model, optimizer in ((wrapper, ours), (plain, theirs)):
            model(batch).square().sum().backward()
            if model is wrapper:
                model.synchronize()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    for (name, one), other in zip(wrapper.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_gradients_that_were_clipped_are_those_of_the_step(pair):
    wrapper, (model, *_) = pair
    optimizer = torch.optim.SGD(wrapper.optim_parameters(), lr=1.0)
    wrapper.eval()(torch.ones(4, 4)).square().sum().backward()
    wrapper.synchronize()
    bias, gradient = model.last.bias.detach().clone(), model.last.bias.grad.clone()
    model.last.bias.grad.mul_(0.5)
    wrapper.synchronize()  # shows what is summed, once more
    assert torch.equal(model.last.bias.grad, gradient * 0.5)
    wrapper.step(optimizer.step, is_async=False)
    torch.testing.assert_close(model.last.bias.detach(), bias - gradient * 0.5)


def test_a_hook_may_change_what_a_layer_gives():
    engine, (model, _) = make("with an original")
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.first.register_forward_hook(lambda layer, args, output: output * 2)
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    ours, theirs = engine.eval()(batch), plain.eval()(batch)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    engine.synchronize()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


def test_weights_stay_where_they_are(pair):
    wrapper, (model, *_) = pair
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert wrapper.to("cpu", torch.float32) is wrapper
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    for move in (lambda: wrapper.half(), lambda: wrapper.to("meta")):
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            move()
