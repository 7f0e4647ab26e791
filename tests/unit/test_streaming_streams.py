"""Faults that occur only on the streams of a GPU, as far as a CPU can show them."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.host_weights import make_host_weights
from stageline.streaming.lanes import BufferPool, DeviceBudgetError, Lane, Queue
from stageline.streaming.passes import StagePass
from stageline.streaming.plan import Plan
from stageline.streaming.run_config import RoundPipeRunConfig
from tests.helpers.late_queues import late_lanes
from tests.helpers.streamed_models import BATCH, each_layer, linears, square

CPU = torch.device("cpu")


def test_a_buffer_that_changes_leaves_its_neighbours_of_the_stage_alone():
    """Keep them apart in autograd, although they share one storage."""

    def make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    ours, theirs = make(), make()
    engine = RoundPipe(ours, lanes=[Lane.cpu()])
    whole = RoundPipeRunConfig(num_microbatch=1, execute_plan=Plan((), (range(0, 4),)))
    loss = engine.forward_backward((BATCH,), loss_fn=square, run_config=whole)
    assert torch.equal(loss, square(theirs(BATCH), None))
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one, other)


class LiveBytes:
    """Counts the bytes that are really alive: the pool's own count trusts that it frees them."""

    def __init__(self):
        self.now = self.peak = 0

    def allocate(self, num_bytes):
        array = np.empty(num_bytes, dtype=np.uint8)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(array, self._gone, num_bytes)
        return torch.from_numpy(array)

    def _gone(self, num_bytes):
        self.now -= num_bytes


def test_what_the_pool_drops_is_free():
    torch.manual_seed(3)
    sizes = [6, 40, 6, 90, 10, 6]  # buffers of other sizes, so that idle ones have to go
    model = nn.Sequential(*(nn.Linear(*pair) for pair in zip(sizes, [*sizes[1:], 6], strict=True)))
    budget, live = 9_000, LiveBytes()
    lane = Lane(CPU, pool=BufferPool(CPU, budget, live.allocate))
    engine = RoundPipe(model, lanes=[lane])
    plan = RoundPipeRunConfig(execute_plan=each_layer(6))
    for _ in range(3):
        engine.forward_backward((BATCH,), loss_fn=square, run_config=plan)
    assert 0 < live.peak == lane.pool.peak_bytes <= budget


def test_a_prefetch_without_room_costs_no_idle_buffer():
    class Mark:
        def wait(self):
            raise AssertionError("waited for")

    pool = BufferPool(CPU, 1000)
    pool.take(600)
    idle = pool.take(300)
    pool.give(idle, Mark())
    with pytest.raises(DeviceBudgetError, match="next to 600 in use; the budget is 1,000"):
        pool.take(500)
    assert pool.held_bytes == 900


def test_after_an_error_memory_waits_for_what_is_on_its_way_in():
    lane = late_lanes(1)[0]
    model = linears(1)
    hosted_layers = make_host_weights(model)
    seat = StagePass(lane, hosted_layers, makes_gradients=False, is_recomputed=False, snapshots={})
    seat.upload(1.0)
    seat.abandon()
    buffer = lane.pool.take(512)
    lane.compute.after(buffer.mark)
    lane.compute.run(buffer.data.zero_)
    lane.compute.record().wait()
    lane.inward.record().wait()
    assert not buffer.data.any()


class NotingQueue(Queue):
    def __init__(self):
        self.used = []

    def uses(self, tensor):
        self.used.append(tensor)


def test_compute_keeps_what_another_queue_brought():
    """On a GPU its memory is else used again before compute reads it."""
    compute = NotingQueue()
    elsewhere = torch.device("cpu", 0)  # not equal to the host's: values are brought to it
    lane = Lane(elsewhere, compute, pool=BufferPool(elsewhere))
    engine = RoundPipe(linears(3), lanes=[lane])
    settings = RoundPipeRunConfig(num_microbatch=1, execute_plan=each_layer(3))
    label = torch.zeros(4, 6)
    engine.forward_backward(
        (BATCH,), label=label, loss_fn=lambda out, its: (out - its).sum(), run_config=settings
    )
    found = [each for each in compute.used if torch.equal(each, BATCH)]
    assert len(found) == 2  # forward, and again to recompute the first layer
    assert any(torch.equal(each, label) for each in compute.used)
