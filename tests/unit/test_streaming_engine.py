"""The streaming engine against plain PyTorch, on lanes that work at once and on late ones."""

import copy

import pytest
import torch
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.lanes import Lane
from stageline.streaming.passes import layer_seed
from stageline.streaming.plan import Plan
from stageline.streaming.run_config import RoundPipeRunConfig
from tests.helpers.late_queues import late_lanes

CUT = Plan((range(0, 2), range(2, 3)), (range(3, 5), range(1, 3), range(0, 1)))
LAYERWISE = Plan(
    tuple(range(at, at + 1) for at in range(4)), tuple(range(at, at + 1) for at in range(4, -1, -1))
)
# each pair of values of two columns is in one of them
WAYS = [
    (1, False, "stage", None), (1, True, "layer", CUT), (2, False, "layer", CUT),
    (2, True, "stage", None), (3, False, "stage", CUT), (3, True, "layer", None),
]  # fmt: skip


def lanes_of(count, is_late):
    return late_lanes(count) if is_late else [Lane.cpu() for _ in range(count)]


def make_model(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def make_batch(size=7):
    draw = torch.Generator().manual_seed(2)
    return torch.randn(size, 8, generator=draw), torch.randn(size, 4, generator=draw)


def loss_fn(output, label):
    return (output - label).square().sum()


def plain_loop(model, batch, label, num_parts):
    """Return the sum of losses over micro-batches, gradients added up in the model."""
    total = 0
    for part, its_label in zip(batch.tensor_split(num_parts), label.tensor_split(num_parts)):
        loss = loss_fn(model(part), its_label)
        loss.backward()
        total = total + loss.detach()
    return total


def assert_equal(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("num_lanes", "is_late", "grain", "plan"), WAYS)
def test_synchronous_steps_are_those_of_plain_pytorch(num_lanes, is_late, grain, plan):
    theirs, ours = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, is_late))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.1)
    batch, label = make_batch()  # 7 rows: micro-batches of unequal size
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
    for _ in range(3):
        expected = plain_loop(theirs, batch, label, 3)
        plain.step()
        plain.zero_grad()
        loss = engine.forward_backward((batch,), label=label, loss_fn=loss_fn, run_config=config)
        assert torch.equal(loss, expected) and not loss.requires_grad
        engine.step(optimizer.step, is_async=False)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("num_lanes", "is_late"), [(1, True), (3, True)])
def test_asynchronous_steps_are_one_step_stale(num_lanes, is_late):
    """V_0 = W_0; g_t = gradient at V_t; W_(t+1) = update(W_t, g_t); V_(t+1) = W_t."""
    ours, newest, seen = make_model(), make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, is_late))
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.1)
    plain = torch.optim.AdamW(newest.parameters(), lr=0.1)
    batch, label = make_batch()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=CUT)
    for step in range(6):
        call = {"label": label, "loss_fn": loss_fn, "run_config": config}
        loss = engine.forward_backward((batch + step,), **call)
        engine.step(optimizer.step)
        expected = plain_loop(seen, batch + step, label, 2)
        assert torch.equal(loss, expected), step
        before = copy.deepcopy(newest.state_dict())
        for parameter, other in zip(newest.parameters(), seen.parameters(), strict=True):
            parameter.grad, other.grad = other.grad, None
        plain.step()
        seen.load_state_dict(before)
    engine.synchronize()
    assert_equal(ours, newest)


def test_two_asynchronous_steps_without_a_pass_between():
    ours = make_model()
    engine = RoundPipe(ours)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    batch, label = make_batch()
    engine.forward_backward((batch,), label=label, loss_fn=loss_fn)
    engine.step(optimizer.step)
    engine.step(optimizer.step)  # there is no gradient left
    engine.synchronize()
    theirs = make_model()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    plain_loop(theirs, batch, label, 2)
    plain.step()
    assert_equal(ours, theirs)


def test_gradients_add_up_over_calls_and_are_shown_without_being_lost():
    ours, theirs = make_model(), make_model()
    engine = RoundPipe(ours, lanes=late_lanes(2))
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    batch, label = make_batch()
    for shift in (0, 1, 2):
        engine.forward_backward((batch + shift,), label=label, loss_fn=loss_fn)
        plain_loop(theirs, batch + shift, label, 3)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
    engine.step(optimizer.step, is_async=False)
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        return nn.functional.dropout(self.linear(value), 0.5, self.training)


def noisy_model():
    torch.manual_seed(1)
    return nn.Sequential(*(Noisy() for _ in range(5)))


@pytest.mark.parametrize(
    ("num_lanes", "is_late", "grain", "plan"),
    [
        (1, True, "layer", CUT),
        (3, True, "stage", LAYERWISE),
    ],
)
def test_random_numbers_do_not_depend_on_how_layers_are_run(num_lanes, is_late, grain, plan):
    theirs, ours = noisy_model(), noisy_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, is_late))
    batch, _ = make_batch()
    torch.manual_seed(5)
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
    loss = engine.forward_backward(
        (batch,), loss_fn=lambda output, _: output.square().sum(), run_config=config
    )
    after = torch.rand(3)
    torch.manual_seed(5)
    base, total = int(torch.randint(2**62, ())), 0
    expected_after = torch.rand(3)
    for place, value in enumerate(batch.tensor_split(3)):
        for number, layer in enumerate(theirs):
            torch.manual_seed(layer_seed(base, number, place, 3))
            value = layer(value)
        part = value.square().sum()
        part.backward()
        total = total + part.detach()
    assert torch.equal(loss, total) and torch.equal(after, expected_after)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(("num_lanes", "is_late", "grain", "plan"), WAYS[1::2])
def test_a_forward_call_joins_autograd(num_lanes, is_late, grain, plan):
    theirs, ours = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, is_late))
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
    batch, label = make_batch()
    ours_in, theirs_in = (batch.clone().requires_grad_() for _ in range(2))
    output = engine(ours_in * 2, roundpipe_run_config=config)
    loss_fn(output, label).backward()
    expected = theirs(theirs_in * 2)
    loss_fn(expected, label).backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not engine(batch).requires_grad
    again = engine(batch, roundpipe_run_config=config).sum()
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time through one call"):
        again.backward()


def test_a_profiler_shows_the_name_of_the_model():
    engine = RoundPipe(make_model(), name="mine", model_run_config=RoundPipeRunConfig(
        num_microbatch=2, execute_plan=Plan((range(0, 3),), (range(3, 5), range(0, 3)))
    ))  # fmt: skip
    batch, label = make_batch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        engine.forward_backward((batch,), label=label, loss_fn=loss_fn)
    shown = {event.name for event in profiler.events() if event.name.startswith("mine ")}
    assert shown == {
        f"mine {work}, micro-batch {part}"
        for work in ("forward of layers 0-2", "turn of layers 3-4", "backward of layers 0-2")
        for part in range(2)
    }


def test_inputs_get_gradients_of_a_fused_call():
    engine, theirs = RoundPipe(make_model(), lanes=late_lanes(2)), make_model()
    batch, label = make_batch()
    ours_in, theirs_in = (batch.clone().requires_grad_() for _ in range(2))
    loss, output = engine.forward_backward(
        (ours_in * 2,), label=label, loss_fn=loss_fn, return_outputs=True
    )
    expected = theirs(theirs_in * 2)
    loss_fn(expected, label).backward()
    torch.testing.assert_close(ours_in.grad, theirs_in.grad)
    torch.testing.assert_close(output, expected)


def test_several_losses_are_differentiated_as_one_and_summed_apart():
    ours, theirs = make_model(), make_model()
    engine = RoundPipe(ours)
    batch, label = make_batch(6)

    def two(output, its_label):
        return [(output - its_label).square().sum(), output.abs().sum()]

    losses = engine.forward_backward((batch,), label=label, loss_fn=two)
    expected = two(theirs(batch), label)
    sum(expected).backward()
    torch.testing.assert_close(losses, [each.detach() for each in expected])
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_optimizer_has_its_own_dtype():
    ours = make_model().bfloat16()
    engine = RoundPipe(ours, optim_dtype=torch.float32)
    masters = dict(engine.optim_named_parameters())
    assert masters.keys() == dict(make_model().named_parameters()).keys()
    assert {each.dtype for each in masters.values()} == {torch.float32}
    batch, label = (each.bfloat16() for each in make_batch())
    optimizer = torch.optim.SGD(masters.values(), lr=1e-4)
    for _ in range(3):
        engine.forward_backward((batch,), label=label, loss_fn=loss_fn)
        engine.step(optimizer.step, is_async=False)
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16()), name
    # small steps that 16 bits would lose are kept
    assert any(
        not torch.equal(masters[name], parameter.float())
        for name, parameter in ours.named_parameters()
    )
