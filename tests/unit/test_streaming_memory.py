"""Memory of the streaming engine: budgets of devices, and what it needs on the host."""

import os
from pathlib import Path

import pytest
import torch

from commands.train_engines import settle_allocators
from optimizer import adamw
from stageline.modules.layer_seeds import NO_SEEDS
from stageline.streaming import host_weights, passes
from stageline.streaming.engine import RoundPipe
from stageline.streaming.host_weights import (
    ALIGNMENT,
    ALLOCATOR_VARIABLES,
    all_homes,
    host_bytes,
    pinned_block,
)
from stageline.streaming.lanes import Lane
from stageline.streaming.runner import StreamedCall
from tests.helpers.fake_devices import fake_accelerators
from tests.helpers.streamed_models import BATCH, linears, loop, run, square


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_four_times_the_budget_trains_within_it(count):
    ours, theirs = linears(24), linears(24)
    weight_bytes = sum(-(-each.numel() * 4 // ALIGNMENT) * ALIGNMENT for each in ours.parameters())
    budget = weight_bytes // 4  # gradients come on top
    lanes = [Lane.cpu(budget=budget) for _ in range(count)]
    engine = RoundPipe(ours, lanes=lanes)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-3)
    for _ in range(3):
        loss = engine.forward_backward((BATCH,), loss_fn=square)
        expected = loop(theirs, BATCH, count + 1)
        assert torch.equal(loss, expected)
        engine.step(optimizer.step, is_async=False)
        torch.optim.SGD(theirs.parameters(), lr=1e-3).step()
        theirs.zero_grad()
    assert 0 < max(lane.pool.peak_bytes for lane in lanes) <= budget


def test_the_host_memory_that_is_stated_is_what_it_takes():
    model = linears(6).bfloat16()
    model[0].requires_grad_(False)
    engine = RoundPipe(model, optim_dtype=torch.float32)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-3)
    engine.forward_backward((BATCH.bfloat16(),), loss_fn=square)
    engine.synchronize()
    homes = all_homes(engine._hosted_layers)
    tensors = [each for home in homes for each in (home.parameter, home.back, home.total)]
    tensors += list(optimizer.param_groups[0]["params"])
    tensors += [each for hosted in engine._hosted_layers for each in hosted.staged.values()]
    taken = sum(each.numel() * each.element_size() for each in tensors if each is not None)
    assert host_bytes(engine._hosted_layers, torch.float32) == taken


@pytest.mark.parametrize(("limit", "num_moved"), [(None, 0), (0, 10), (2 * 2 * 6 * 4, 8)])
def test_inputs_that_wait_stay_on_the_device_within_their_budget(limit, num_moved, monkeypatch):
    moved = []
    original = passes.bring

    def bring(flow, lane):
        if lane is None:
            moved.append(flow)
        return original(flow, lane)

    monkeypatch.setattr(passes, "bring", bring)
    lane = Lane.cpu()
    lane.inputs_budget = limit
    ours, theirs = linears(6), linears(6)
    assert torch.equal(run(RoundPipe(ours, lanes=[lane]), BATCH, 6), loop(theirs, BATCH, 2))
    assert len(moved) == num_moved  # five layers are recomputed, with two micro-batches each


def test_a_model_that_the_host_cannot_hold_is_refused_before_memory_is_taken(monkeypatch):
    engine = RoundPipe(linears(3))
    needed = host_bytes(engine._hosted_layers, None) - 3 * 42 * 4
    monkeypatch.setattr(host_weights, "available_memory", lambda: needed - 1)
    with pytest.raises(MemoryError, match=f"training takes {needed:,} bytes.*{needed - 1:,} are"):
        list(engine.optim_parameters())
    assert all(home.master is None for home in all_homes(engine._hosted_layers))
    monkeypatch.setattr(host_weights, "available_memory", lambda: needed)
    assert len(list(engine.optim_parameters())) == 6


def test_pinned_blocks_are_counted_as_torch_takes_them(monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    mib = 1 << 20
    assert [pinned_block(size) for size in (0, 5, 5 * mib)] == [0, 8, 8 * mib]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "pinned_max_round_threshold_mb:4,backend:native")
    assert [pinned_block(size) for size in (3 * mib, 5 * mib)] == [4 * mib, 5 * mib]
    settle_allocators()  # the user has settled it
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # undone with the test
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    settle_allocators()  # settings change only where there is a GPU
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settle_allocators()
    assert os.environ["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True")
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    knows_the_key = "pinned_max_round_threshold" in header.read_text()  # torch 2.11 does not
    assert pinned_block(5 * mib) == (5 if knows_the_key else 8) * mib


def test_the_host_memory_that_is_stated_counts_rounded_blocks(monkeypatch):
    engine = RoundPipe(linears(2).bfloat16(), optim_dtype=torch.float32)
    plain = host_bytes(engine._hosted_layers, torch.float32)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fake_accelerators(monkeypatch, "xpu", 1)
    # each layer has a back page and a staged one: 6 x 6 and 6 of two bytes, each from 256 on
    pages = 2 * 2 * (512 - 2 * 42)
    assert host_bytes(engine._hosted_layers, torch.float32) == plain + pages


def test_a_device_gets_the_integers_of_a_micro_batch_once():
    """Move them once: every stage and its loss read them; pixels are only for the first stage."""
    batch = {"input_ids": torch.zeros(1, 3), "pixel_values": torch.zeros(2)}
    call, device = StreamedCall(NO_SEEDS, [batch, batch]), torch.device("meta")
    first = call.batch(0, device, with_pixels=True)
    later = call.batch(0, device)
    assert set(first) == set(batch) and set(later) == {"input_ids"}
    assert later["input_ids"] is first["input_ids"]
    assert call.batch(1, device)["input_ids"] is not first["input_ids"]


def test_an_update_on_the_host_of_a_gpu_is_one_kernel(monkeypatch):
    """Four times as fast, and rounded differently: where no GPU is, the bits of a run stay."""

    def is_fused():
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]}]
        return bool(adamw(groups, learning_rate=0.1, weight_decay=0.0).defaults["fused"])

    for count in range(2):
        fake_accelerators(monkeypatch, "xpu", count)
        assert is_fused() == bool(count)
