"""Every kind of accelerator takes one path; here torch reports an XPU, which no other test names.

Whole runs on cards of a kind that torch does not know are in tests/gpu/test_a_runs.py.
"""

import os

import pytest
import torch

from stageline.device import accelerators
from stageline.distributed.process_group import (
    choose_device,
    group_backend,
    stage_devices,
    take_own_devices,
)
from stageline.errors import UserError
from stageline.inference.decoding.stage_decoder import cache_budget
from stageline.planner.estimate import device_capacity
from stageline.training.memory import peak_memory
from tests.helpers.fake_devices import fake_accelerators

GIB = 2**30


@pytest.fixture
def cards(monkeypatch):
    """Return two cards of 8 GiB, the first of them with 6 GiB left."""
    return fake_accelerators(
        monkeypatch,
        "xpu",
        2,
        init=lambda: None,
        default_generators=tuple(torch.Generator().manual_seed(seed) for seed in (7, 8)),
        mem_get_info=lambda card: ((6 + card.index) * GIB, 8 * GIB),
        memory_reserved=lambda card: 0,
        max_memory_allocated=lambda card: card.index + 3,
    )


def test_what_torch_finds_is_taken_and_nothing_else(cards):
    assert accelerators() == accelerators("xpu") == stage_devices() == cards
    assert accelerators("cpu") == [] and stage_devices("cpu") == [torch.device("cpu")]
    assert choose_device("auto", local_rank=1, local_world_size=2) == cards[1]
    assert group_backend(cards[0]) == "cpu:gloo,xpu:xccl"
    assert group_backend(torch.device("cpu")) == "gloo"
    for asked in ("cuda", "npu", "mps"):
        with pytest.raises(UserError, match=rf"--device {asked}: torch .* finds 2 x xpu"):
            accelerators(asked)
    with pytest.raises(UserError, match=r"2 devices of the kind xpu for 3 .* \(ZE_AFFINITY_MASK"):
        choose_device("auto", local_rank=0, local_world_size=3)


def test_memory_figures_are_those_of_the_device(cards):
    assert peak_memory(cards[1]) == 4
    assert device_capacity(cards[0], num_local_ranks=2) == int(6 * GIB - 0.05 * 8 * GIB)
    assert cache_budget(cards[1], gib=None, processes=1) == int(0.8 * 7 * GIB)


def test_a_replica_takes_its_own(cards, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "4,7")
    take_own_devices("xpu", None, index=1, count=2)
    assert os.environ["ZE_AFFINITY_MASK"] == "7"


def test_mps_answers_in_one_process_and_trains_nowhere(monkeypatch):
    (only,) = fake_accelerators(monkeypatch, "mps", 1)
    assert accelerators() == [], "a run that nobody has tried is not begun unasked"
    assert accelerators("mps") == [only]
    with pytest.raises(UserError, match="in stages.*float64"):
        choose_device("mps", local_rank=0, local_world_size=1)
