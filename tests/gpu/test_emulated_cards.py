"""The emulated cards: they tell the faults that are put in here, and nothing that is none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.lanes import Lane, StreamQueue
from stageline.streaming.run_config import RoundPipeRunConfig

pytestmark = pytest.mark.usefixtures("cards")


def told(cards):
    """What the cards told so far, which is then forgotten."""
    found = "\n".join(cards.races)
    cards.clear()
    return found


def on(stream, work):
    with torch.cuda.stream(stream):
        return work()


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


def test_a_stream_that_waits_for_nothing(cards):
    side = torch.cuda.Stream()
    value = torch.ones(3, device="cuda")
    on(side, lambda: value * 2)
    assert "reads what stream 0 of card 0" in told(cards)
    side.wait_stream(torch.cuda.current_stream())
    on(side, lambda: value * 2)
    assert not told(cards)
    value.add_(1)
    assert "writes what stream" in told(cards)  # which the side stream still reads
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


def test_waits_of_the_host(cards):
    value = torch.ones(3, device="cuda")
    cards.clear()
    value[0].item(), value.cpu(), value[value > 0]
    value.to("cpu", non_blocking=True)  # page-locked, so nobody waits
    torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    found = sorted((wait.kind, count) for wait, count in cards.waits.items())
    expected = ["_local_scalar_dense", "blocking copy to the host", "index"]
    assert found == [(kind, 1) for kind in expected]
    assert all(wait.place.startswith("tests/gpu/test_emulated") for wait in cards.waits)


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
