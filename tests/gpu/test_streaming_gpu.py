"""The streaming engine on the streams of a GPU, or of emulated ones.

Numbers are held against plain PyTorch. Each queue is made slow in turn: then a wait that is
missing shows as wrong numbers, as on the late queues of the unit tests. Several lanes share one
GPU where there is no second one: their streams know nothing of each other.
"""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.passes import layer_seed
from stageline.streaming.plan import Plan
from stageline.streaming.run_config import RoundPipeRunConfig

pytestmark = pytest.mark.cards(4, needs=1)
WIDTH = 256
CYCLES = 2_000_000  # about a millisecond that a stream sleeps
CUT = Plan((range(0, 2), range(2, 3)), (range(3, 5), range(1, 3), range(0, 1)))
EACH = Plan(
    tuple(range(at, at + 1) for at in range(4)), tuple(range(at, at + 1) for at in range(4, -1, -1))
)
# queues that sleep before all work; emulated ones are never slow, and tell what waits for nothing
SLOW_QUEUES = [
    pytest.param(name, marks=pytest.mark.real) for name in ("compute", "inward", "outward")
]
SLOW_COPIES = [SLOW_QUEUES[1], SLOW_QUEUES[2]]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}  # in float64 only the order of sums differs


def lanes_of(count, *, slow=None, budget=None):
    """Lanes on the GPUs that there are, round robin; one of the queues sleeps before all work."""
    from stageline.streaming.lanes import Lane

    num_gpus = torch.cuda.device_count()
    lanes = [
        Lane.streams(torch.device("cuda", index % num_gpus), budget=budget)
        for index in range(count)
    ]
    for lane in lanes:
        if slow is not None:
            make_slow(getattr(lane, slow))
    return lanes


def make_slow(queue):
    original = queue.run

    def run(work):
        original(lambda: (torch.cuda._sleep(CYCLES), work()))

    queue.run = run


def make_model(seed=1):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 64)).double()


def make_batch(size=7):
    draw = torch.Generator().manual_seed(2)
    batch = torch.randn(size, WIDTH, generator=draw, dtype=torch.float64)
    return batch, torch.randn(size, 64, generator=draw, dtype=torch.float64)


def loss_fn(output, label):
    return (output - label).square().sum()


def plain_loop(model, batch, label, num_parts):
    total = 0
    for part, its_label in zip(
        batch.tensor_split(num_parts), label.tensor_split(num_parts), strict=True
    ):
        loss = loss_fn(model(part), its_label)
        loss.backward()
        total = total + loss.detach()
    return total


def assert_close(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, **CLOSE)


@pytest.mark.parametrize("slow", [None, *SLOW_QUEUES])
@pytest.mark.parametrize(
    ("num_lanes", "grain", "plan"),
    [
        (1, "stage", None),
        (1, "layer", CUT),
        (1, "stage", EACH),
        (2, "stage", CUT),
        (4, "layer", EACH),
    ],
)
def test_steps_are_those_of_plain_pytorch(num_lanes, grain, plan, slow):
    theirs, ours = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, slow=slow))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.01)
    batch, label = make_batch()
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
    for step in range(3):
        expected = plain_loop(theirs, batch + step, label, 3)
        plain.step()
        plain.zero_grad()
        call = {"label": label, "loss_fn": loss_fn, "run_config": config}
        loss = engine.forward_backward((batch + step,), **call)
        assert loss.device.type == "cpu"
        torch.testing.assert_close(loss, expected, **CLOSE)
        engine.step(optimizer.step, is_async=False)
    assert_close(ours, theirs)


@pytest.mark.parametrize("slow", [None, *SLOW_COPIES])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_asynchronous_steps_are_one_step_stale(num_lanes, slow):
    """V_0 = W_0; g_t = gradient at V_t; W_(t+1) = update(W_t, g_t); V_(t+1) = W_t."""
    ours, newest, seen = make_model(), make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, slow=slow))
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.01)
    plain = torch.optim.AdamW(newest.parameters(), lr=0.01)
    batch, label = make_batch()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=CUT)
    for step in range(6):
        call = {"label": label, "loss_fn": loss_fn, "run_config": config}
        loss = engine.forward_backward((batch + step,), **call)
        engine.step(optimizer.step)
        expected = plain_loop(seen, batch + step, label, 2)
        torch.testing.assert_close(loss, expected, **CLOSE)
        before = copy.deepcopy(newest.state_dict())
        for parameter, other in zip(newest.parameters(), seen.parameters(), strict=True):
            parameter.grad, other.grad = other.grad, None
        plain.step()
        seen.load_state_dict(before)
    engine.synchronize()
    assert_close(ours, newest)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return nn.functional.dropout(self.linear(value), 0.5, self.training)


def noisy_model():
    torch.manual_seed(1)
    return nn.Sequential(*(Noisy() for _ in range(5))).double()


@pytest.mark.parametrize(("num_lanes", "grain", "plan"), [(1, "layer", CUT), (2, "stage", EACH)])
def test_dropout_is_that_of_the_documented_seeds(num_lanes, grain, plan):
    theirs, ours = noisy_model().cuda(), noisy_model()
    engine = RoundPipe(ours, lanes=lanes_of(num_lanes, slow="compute"))
    batch, _ = make_batch()
    torch.manual_seed(5)
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
    loss = engine.forward_backward(
        (batch,), loss_fn=lambda output, _: output.square().sum(), run_config=config
    )
    after = torch.rand(3), torch.rand(3, device="cuda").cpu()
    torch.manual_seed(5)
    base, total = int(torch.randint(2**62, ())), 0
    expected_after = torch.rand(3), torch.rand(3, device="cuda").cpu()
    for place, value in enumerate(batch.cuda().tensor_split(3)):
        for number, layer in enumerate(theirs):
            torch.manual_seed(layer_seed(base, number, place, 3))
            value = layer(value)
        part = value.square().sum()
        part.backward()
        total = total + part.detach()
    torch.testing.assert_close(loss, total.cpu(), **CLOSE)
    for one, other in zip(after, expected_after, strict=True):
        assert torch.equal(one, other)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad.cpu(), **CLOSE)


@pytest.mark.parametrize("slow", [None, *SLOW_QUEUES])
@pytest.mark.parametrize("output_device", ["cpu", "cuda"])
def test_a_forward_call_joins_autograd(output_device, slow):
    theirs, ours = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(2, slow=slow))
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=CUT, output_device=output_device)
    batch, label = make_batch()
    ours_in, theirs_in = (batch.clone().requires_grad_() for _ in range(2))
    output = engine(ours_in * 2, roundpipe_run_config=config)
    assert output.device.type == output_device
    loss = loss_fn(output, label.to(output_device))
    if output_device == "cuda":
        torch.cuda._sleep(20 * CYCLES)  # the gradient is late, on a stream of the caller's
    loss.backward()
    expected = theirs(theirs_in * 2)
    loss_fn(expected, label).backward()
    torch.testing.assert_close(output.cpu(), expected, **CLOSE)
    torch.testing.assert_close(ours_in.grad, theirs_in.grad, **CLOSE)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)
    with torch.no_grad():
        assert not engine(batch).requires_grad


def test_inputs_that_the_callers_stream_has_not_made_yet():
    ours, theirs = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(1))
    batch, label = make_batch()
    on_gpu = (batch.cuda(), label.cuda())
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * CYCLES)
    late = [each * 3 for each in on_gpu]
    loss = engine.forward_backward((late[0],), label=late[1], loss_fn=loss_fn)
    del late
    expected = plain_loop(theirs, batch * 3, label * 3, 2)
    torch.testing.assert_close(loss, expected, **CLOSE)


def test_values_outlive_their_last_reference():
    """Many micro-batches of one size on a slow compute stream: memory is used again at once."""
    ours, theirs = make_model(), make_model()
    engine = RoundPipe(ours, lanes=lanes_of(1, slow="compute"))
    batch, label = make_batch(64)
    config = RoundPipeRunConfig(num_microbatch=16, execute_plan=EACH)
    for shift in range(2):
        loss = engine.forward_backward(
            (batch + shift,), label=label, loss_fn=loss_fn, run_config=config
        )
        torch.testing.assert_close(loss, plain_loop(theirs, batch + shift, label, 16), **CLOSE)
    engine.synchronize()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **CLOSE)


def test_buffers_change_once_a_micro_batch():
    def make():
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(WIDTH)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 64)).double()

    ours, theirs = make(), make()
    engine = RoundPipe(ours, lanes=lanes_of(1, slow="outward"))
    plan = Plan((range(0, 2),), (range(2, 3), range(0, 2)))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    batch, label = make_batch(8)
    for _ in range(2):
        loss = engine.forward_backward((batch,), label=label, loss_fn=loss_fn, run_config=config)
        torch.testing.assert_close(loss, plain_loop(theirs, batch, label, 2), **CLOSE)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_memory_of_the_gpu_stays_within_the_budget():
    """A model four times the budget; what comes on top is the activations of narrow batches."""
    from tests.helpers.emulated_gpu.cards import Cards

    is_real = Cards.entered is None
    # 16 MiB a layer; cuBLAS takes up to 32 MiB a stream, an emulated card nothing
    width, workspace = (2048, 96 << 20) if is_real else (256, 1 << 20)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(32)]
    model = nn.Sequential(*layers)
    budget = sum(each.weight.nbytes for each in layers) // 4
    lanes = lanes_of(1, budget=budget)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = RoundPipe(model, lanes=lanes)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-4)
    batch = torch.randn(8, width) / width**0.5
    for _ in range(3):
        engine.forward_backward((batch,), loss_fn=lambda output, _: output.square().sum())
        engine.step(optimizer.step)
    engine.synchronize()
    assert 0 < lanes[0].pool.peak_bytes <= budget
    assert torch.cuda.max_memory_allocated() - before <= budget + workspace


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_ways_of_pinning_give_the_same_numbers(pin_model):
    theirs, expected = make_model(), None
    batch, label = make_batch()
    expected = plain_loop(theirs, batch, label, 2)
    for _ in range(2):  # the second one's memory may be where the first one's was
        ours = make_model()
        places = [each.data_ptr() for each in ours.parameters()]
        engine = RoundPipe(ours, pin_model=pin_model, lanes=lanes_of(1))
        assert all(each.is_pinned() == (pin_model != "off") for each in ours.parameters())
        stayed = [each.data_ptr() for each in ours.parameters()] == places
        assert stayed == (pin_model != "alloc")
        loss = engine.forward_backward((batch,), label=label, loss_fn=loss_fn)
        torch.testing.assert_close(loss, expected, **CLOSE)
        engine.synchronize()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)
        del engine, ours
        gc.collect()


def test_the_controller_waits_for_no_stream_while_it_gives_work():
    """A pass is given in one go; torch warns of each operation that makes the host wait."""
    engine = RoundPipe(make_model(), lanes=lanes_of(1))
    batch, label = make_batch()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=EACH)
    call = {"label": label, "loss_fn": loss_fn, "run_config": config}
    engine.forward_backward((batch,), **call)  # allocations of the first time wait
    engine.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.forward_backward((batch,), **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in said if "synchroniz" in str(each.message)]
    assert not waits, [f"{each.filename}:{each.lineno} {each.message}" for each in waits]
