"""The streaming engine with layers of every kind, and when something goes wrong."""

import pytest
import torch
from torch import nn

from stageline.streaming import passes
from stageline.streaming.engine import RoundPipe
from stageline.streaming.host_weights import all_homes
from stageline.streaming.lanes import Lane
from stageline.streaming.recompute import (
    doing_recompute,
    get_recompute_data,
    running,
    save_for_recompute,
)
from stageline.streaming.run_config import Packed, RoundPipeRunConfig
from tests.helpers.late_queues import late_lanes
from tests.helpers.streamed_models import BATCH, each_layer, linears, loop, run, square


@pytest.fixture(params=["eager", "late"])
def lanes(request):
    return late_lanes(2) if request.param == "late" else [Lane.cpu(), Lane.cpu()]


def assert_gradients(ours, theirs, **tolerance):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name, **tolerance)


def test_frozen_layers_send_nothing(lanes, monkeypatch):
    ours, theirs = linears(5), linears(5)
    for model in (ours, theirs):
        for frozen in (0, 1, 3):
            model[frozen].requires_grad_(False)
        model[2].bias.requires_grad_(False)
    made = []
    original = passes.StagePass.open
    monkeypatch.setattr(
        passes.StagePass, "open", lambda seat: (made.append(seat), original(seat))[1]
    )
    engine = RoundPipe(ours, lanes=lanes)
    assert torch.equal(run(engine, BATCH, 5), loop(theirs, BATCH, 2))
    engine.synchronize()
    assert_gradients(ours, theirs, rtol=0, atol=0)
    backward = [seat for seat in made if seat.makes_gradients]
    layers = [
        engine._hosted_layers.index(hosted) for seat in backward for hosted in seat.hosted_layers
    ]
    assert layers == [4, 3, 2]  # before the first trained layer nothing goes backward
    sent = sum(home.parameter.numel() for seat in backward for _, home in seat.sent)
    assert sent == 6 * 6 * 2 + 6


def test_tied_weights_and_a_layer_that_comes_twice(lanes):
    def make():
        torch.manual_seed(1)
        embedding, middle = nn.Embedding(9, 6), nn.Linear(6, 6)
        head = nn.Linear(6, 9, bias=False)
        head.weight = embedding.weight
        return nn.Sequential(embedding, middle, nn.Tanh(), middle, head)

    ours, theirs = make(), make()
    engine = RoundPipe(ours, lanes=lanes)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0], [1, 1, 2]])
    assert torch.equal(run(engine, ids, 5), loop(theirs, ids, 2))
    engine.synchronize()
    assert_gradients(ours, theirs, rtol=1e-6, atol=1e-5)
    assert len(list(engine.optim_parameters())) == 3
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01)
    engine.step(optimizer.step, is_async=False)
    torch.optim.SGD(theirs.parameters(), lr=0.01).step()
    assert ours[0].weight is ours[4].weight
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Gated(nn.Module):
    """Its output depends on a buffer that each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, value):
        self.count = self.count + 1
        return self.linear(value) / self.count


def test_buffers_change_once_a_micro_batch(lanes):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Gated(), nn.Linear(6, 6))

    ours, theirs = make(), make()
    engine = RoundPipe(ours, lanes=lanes)
    for _ in range(2):
        assert torch.equal(run(engine, BATCH, 4), loop(theirs, BATCH, 2))
    for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one, other), name
    engine.synchronize()
    assert_gradients(ours, theirs, rtol=1e-6, atol=1e-6)


def test_micro_batches_by_hand(lanes):
    ours, theirs = linears(3), linears(3)
    engine = RoundPipe(ours, lanes=lanes)
    settings = RoundPipeRunConfig(
        split_input=lambda args, kwargs, num: ([(args[0][:1],), (args[0][1:],)], [{}, {}]),
        split_label=lambda label, num: [label, 2 * label],
        merge_output=lambda outputs: [len(each) for each in outputs],
    )
    loss, output = engine.forward_backward(
        (BATCH,),
        label=3,
        loss_fn=lambda out, by: out.sum() * by,
        return_outputs=True,
        run_config=settings,
    )
    torch.testing.assert_close(loss, (theirs(BATCH[:1]).sum() * 3 + theirs(BATCH[1:]).sum() * 6))
    assert output == [1, 3]
    packed = engine(BATCH, roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
    assert isinstance(packed, Packed) and len(packed) == 3
    again = RoundPipe(theirs, lanes=[Lane.cpu()])(packed)
    torch.testing.assert_close(again, theirs(theirs(BATCH)))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.is_broken = nn.Linear(6, 6), False

    def forward(self, value):
        if self.is_broken:
            raise KeyError("broken on purpose")
        return self.linear(value)


def test_an_error_in_a_layer_reaches_the_caller_and_the_engine_goes_on():
    lanes = [Lane.cpu(budget=4000)]
    model = nn.Sequential(nn.Linear(6, 6), Breaks(), nn.Linear(6, 6))
    engine = RoundPipe(model, lanes=lanes)
    first = run(engine, BATCH, 3)
    for _ in range(20):  # no memory is lost on the way
        model[1].is_broken = True
        with pytest.raises(KeyError, match="broken on purpose"):
            run(engine, BATCH, 3)
        model[1].is_broken = False
    assert torch.equal(run(engine, BATCH, 3), first)
    engine.synchronize()
    twice = model[0].weight.grad.clone()
    model.zero_grad()
    square(model(BATCH), None).backward()
    torch.testing.assert_close(twice / 2, model[0].weight.grad)


def test_an_error_in_a_step_is_raised_at_the_next_call_with_its_traceback():
    engine = RoundPipe(linears(2))

    def failing_step():
        raise ZeroDivisionError("in the step")

    run(engine, BATCH, 2)
    engine.step(failing_step)
    with pytest.raises(ZeroDivisionError, match="in the step") as raised:
        engine.synchronize()
    assert "failing_step" in [entry.name for entry in raised.traceback]
    for call in (engine.synchronize, lambda: run(engine, BATCH, 2), lambda: engine(BATCH)):
        with pytest.raises(ZeroDivisionError):
            call()


class Routed(nn.Module):
    """Sends rows to one of two maps, at random: the choice has to be the same again."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.choices = []

    def forward(self, value):
        if doing_recompute():
            (chosen,) = get_recompute_data()
        else:
            chosen = torch.rand(len(value)) > 0.5
            self.choices.append(chosen)
            save_for_recompute(chosen)
        return torch.where(chosen[:, None], self.maps[0](value), self.maps[1](value))


def test_a_layer_keeps_what_its_recomputation_repeats(lanes):
    model = nn.Sequential(Routed(), nn.Linear(6, 6), Routed(), nn.Linear(6, 6))
    engine = RoundPipe(model, lanes=lanes)
    settings = RoundPipeRunConfig(
        num_microbatch=2, execute_plan=each_layer(4), preserve_rng_state=False
    )
    engine.forward_backward((BATCH,), loss_fn=square, run_config=settings)
    engine.synchronize()
    for place, part in enumerate(BATCH.tensor_split(2)):
        value = part
        for layer in model:
            if isinstance(layer, Routed):
                chosen = layer.choices[place][:, None]
                value = torch.where(chosen, layer.maps[0](value), layer.maps[1](value))
            else:
                value = layer(value)
        square(value, None).backward()
    # each gradient was there once, and has come once more
    for parameter, home in zip(model.parameters(), all_homes(engine._hosted_layers), strict=True):
        assert home.parameter is parameter
        torch.testing.assert_close(parameter.grad, 2 * home.total)


def test_keeping_by_the_rules():
    class Twice(nn.Linear):
        def forward(self, value):
            save_for_recompute(1)
            save_for_recompute(2)

    class Never(nn.Linear):
        def forward(self, value):
            return super().forward(value) * get_recompute_data()[0]

    for layer, words in ((Twice(6, 6), "called twice"), (Never(6, 6), "nothing is kept")):
        with pytest.raises(RuntimeError, match=words):
            RoundPipe(nn.Sequential(layer, nn.Linear(6, 6))).forward_backward((BATCH,))


def test_what_is_saved_has_no_graph_and_is_let_go_once_it_was_used():
    kept, weight = {}, torch.ones(2, requires_grad=True)
    for key in ("one", "other"):
        with running(kept, key, is_recomputed=False):
            save_for_recompute({"value": weight * 2}, 3)
    saved, count = kept["one"]
    assert saved["value"].tolist() == [2, 2] and count == 3
    assert not saved["value"].requires_grad and saved["value"].grad_fn is None
    with running(kept, "one", is_recomputed=True):
        assert get_recompute_data()[0]["value"] is saved["value"]
    assert [*kept] == ["other"]
