"""The emulated cards report each fault that these tests cause, and nothing else."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.lanes import Lane, StreamQueue
from stageline.streaming.run_config import RoundPipeRunConfig
from tests.helpers.host_waits import host_waits

pytestmark = pytest.mark.usefixtures("cards")


def told(cards):
    """Return the races that the cards have reported, and clear them."""
    found = "\n".join(cards.races)
    cards.clear()
    return found


def on(stream, work):
    with torch.cuda.stream(stream):
        return work()


def test_values_and_gradients_are_those_of_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    value = torch.randn(5, 4)
    expected = model(value)
    expected.square().sum().backward()
    reference = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parameters = list(model.parameters())
    model.cuda()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    found = model(value.cuda())
    found.square().sum().backward()
    assert found.device == torch.device("cuda", 0) and found.is_cuda
    torch.testing.assert_close(found.cpu(), expected)
    for parameter, grad in zip(parameters, reference, strict=True):
        assert parameter.grad.is_cuda
        torch.testing.assert_close(parameter.grad.cpu(), grad)


@pytest.mark.cards(4)
def test_tensors_of_two_devices_are_refused():
    first, last = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:3")
    with pytest.raises(RuntimeError, match=r"same device.*test_emulated_cards.py:\d+"):
        first + last
    with pytest.raises(RuntimeError, match="same device"):
        first + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        nn.functional.embedding(torch.zeros(2, dtype=torch.long), first.view(3, 1))
    assert (first + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number is a kernel's argument
    assert (first + last.to(first.device)).tolist() == [2.0] * 3


def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.ones(3, device="cuda:1")
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(3, device="cuda").numpy()


def test_a_stream_that_waits_for_nothing(cards):
    side = torch.cuda.Stream()
    value = torch.ones(3, device="cuda")
    on(side, lambda: value * 2)
    assert "reads what stream 0 of card 0" in told(cards)
    side.wait_stream(torch.cuda.current_stream())
    on(side, lambda: value * 2)
    assert not told(cards)
    value.add_(1)
    assert "writes what stream" in told(cards)  # the side stream still reads the value
    torch.cuda.current_stream().wait_stream(side)
    value.add_(1)
    assert not told(cards)


def test_an_event_counts_from_where_it_was_recorded(cards):
    side, value = torch.cuda.Stream(), torch.ones(3, device="cuda")
    event = torch.cuda.current_stream().record_event()
    value.add_(1)
    side.wait_event(event)
    on(side, lambda: value * 2)
    assert "add_" in told(cards)
    event.synchronize()
    on(side, lambda: value * 2)
    assert told(cards)  # the host waited for too little as well
    torch.cuda.synchronize()
    on(side, lambda: value * 2)
    torch.cuda.synchronize()
    assert not told(cards)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_another_stream_may_still_use(cards, is_recorded):
    side, value = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value * 2
    if is_recorded:
        value.record_stream(side)
    del value
    found = told(cards)
    assert is_recorded == (not found)
    assert is_recorded or "is free while" in found


def test_a_pinned_buffer_is_filled_again_too_early(cards):
    host = torch.zeros(3, pin_memory=True)
    assert host.is_pinned() and not torch.zeros(3).is_pinned()
    host.to("cuda", non_blocking=True)
    host.fill_(1)
    assert "the host (fill_" in told(cards)
    host.to("cuda", non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    host.fill_(2)
    assert not told(cards)


def test_a_pinned_buffer_is_read_too_early_by_another_thread(cards):
    host, found = torch.zeros(3, pin_memory=True), []
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    reader = threading.Thread(target=lambda: found.append(host.sum()))
    reader.start()
    reader.join()
    assert "the host (sum" in told(cards)


def test_waits_of_the_host(cards):
    value = torch.ones(3, device="cuda")
    cards.clear()
    value[0].item(), value.cpu(), value[value > 0]
    value.to("cpu", non_blocking=True)  # the target is page-locked, so the host does not wait
    torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    found = sorted((wait.kind, count) for wait, count in cards.waits.items())
    expected = ["_local_scalar_dense", "blocking copy to the host", "index"]
    assert found == [(kind, 1) for kind in expected]
    assert all(wait.place.startswith("tests/gpu/test_emulated") for wait in cards.waits)


@pytest.mark.cards(2)
def test_memory_figures():
    assert torch.cuda.memory_allocated(1) == 0
    value = torch.empty(100, 1000, device="cuda:1")
    view = value.view(-1)[5:]
    assert torch.cuda.memory_allocated(1) == torch.cuda.max_memory_allocated(1) == 400_384
    del value
    assert torch.cuda.memory_allocated(1) == 400_384  # the view holds it
    del view
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.cuda.max_memory_allocated(1) == 400_384
    free, total = torch.cuda.mem_get_info(1)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda:1")
    assert free == total == torch.cuda.mem_get_info(1)[0]


@pytest.mark.cards(2)
def test_each_card_draws_its_own_numbers():
    torch.manual_seed(3)
    host = torch.rand(4)
    torch.manual_seed(3)
    first, second = (torch.rand(4, device=f"cuda:{i}") for i in range(2))
    assert torch.equal(first.cpu(), second.cpu())  # seeded alike
    assert torch.equal(torch.rand(4), host)  # and the host's numbers are not used up
    assert not torch.equal(torch.rand(4, device="cuda:0").cpu(), first.cpu())


def run_engine(lanes):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine = RoundPipe(model, lanes=lanes)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(2):
        engine.forward_backward(
            (torch.randn(6, 16),),
            loss_fn=lambda output, _: output.square().sum(),
            run_config=RoundPipeRunConfig(num_microbatch=3),
        )
        engine.step(optimizer.step)
    engine.synchronize()


@pytest.mark.cards(2)
@pytest.mark.parametrize("missing", [None, "after", "uses", "wait"])
def test_a_wait_that_the_streaming_engine_leaves_out(cards, missing, monkeypatch):
    if missing == "wait":
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    elif missing:
        monkeypatch.setattr(StreamQueue, missing, lambda *_: None)
    run_engine([Lane.streams(torch.device("cuda", index)) for index in range(2)])
    found = told(cards)
    assert bool(found) == bool(missing)


def test_waits_are_counted_by_place():
    value = torch.ones(3, device="cuda")
    with host_waits() as waits:
        for _ in range(2):
            value.sum().item()
        nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device="cuda"))
    (twice,) = [place for place, count in waits.items() if count == 2]
    assert twice.startswith("tests/gpu/test_emulated_cards.py:")
    value.sum().item()
    assert sum(waits.values()) == 2 + len(waits) - 1 > 2


def test_a_transfer_that_nobody_waits_for(cards):
    """NCCL works on a stream of its own; `wait` lets the current one wait."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(3, device="cuda")
    work = dist.all_reduce(value, async_op=True)
    value * 2
    assert "allreduce_" in told(cards)
    work.wait()
    value * 2
    dist.all_reduce(value)
    value.add_(1)
    assert not told(cards)
