"""The mesh: which rank is which stage of which replica; and a process that is alone."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stageline.distributed.process_group import (
    _init_group,
    choose_device,
    distributed_context,
    open_channels,
    warm_up,
)
from stageline.errors import UserError
from tests.helpers.fake_devices import fake_accelerators
from tests.helpers.ranks import run_ranks
from tests.helpers.warm_start import WarmLauncher

ENTRY = Path(__file__).with_name("failing_entry.py")


@pytest.mark.timeout(120)
def test_ranks_of_a_pipeline_are_neighbours_and_replicas_hold_the_same_stage(tmp_path):
    words = [str(ENTRY), "positions", str(tmp_path), "4", "2"]
    assert WarmLauncher(words, {"OMP_NUM_THREADS": "1"}).wait(60) == 0
    said = [(tmp_path / f"position_{rank}").read_text() for rank in range(4)]
    # dp_rank, pp_rank, ranks of the pipeline, ranks of the stage
    assert said == [
        "0 0 [0, 1] [0, 2]",
        "0 1 [0, 1] [1, 3]",
        "1 0 [2, 3] [0, 2]",
        "1 1 [2, 3] [1, 3]",
    ]


def test_a_lone_process_has_a_group_of_its_own():
    with distributed_context(num_ranks=1, device="cpu") as context:
        assert (context.rank, context.world_size, context.pp_rank, context.dp_rank) == (0, 1, 0, 0)
        assert context.is_main and context.device == torch.device("cpu")
        value = torch.ones(2)
        dist.all_reduce(value, group=context.pp_group)
        assert value.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()


def open_and_warm_up(rank):
    """Two pipelines of two ranks: rank = replica * 2 + place in the pipeline."""
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    channels = open_channels(2, [(0, 1), (1, 0)], timeout=timedelta(seconds=60))
    place = SimpleNamespace(
        device=torch.device("cpu"), pp_group=replicas[rank // 2], num_ranks=2, pp_rank=rank % 2
    )
    place.channels = channels
    warm_up(place)
    there, back = channels[0, 1], channels[1, 0]
    assert there is not back and place.pp_group not in (there, back)
    return [dist.get_process_group_ranks(group) for group in (there, back)]


def test_each_direction_of_each_pipeline_has_a_group_that_is_open():
    members = run_ranks(open_and_warm_up, 4)
    assert members == [[[0, 1]] * 2] * 2 + [[[2, 3]] * 2] * 2


def test_no_exchange_waits_longer_than_the_run_does():
    with distributed_context(num_ranks=1, device="cpu", timeout=77.0) as context:
        for group in (context.pp_group, context.dp_group):
            waits = group._get_backend(torch.device("cpu")).options._timeout
            assert waits == timedelta(seconds=77)


def test_on_gpus_nccl_knows_its_device_and_gloo_is_beside_it(monkeypatch):
    told, variable = {}, "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *how, **more: told.update(more, how=how))
    _init_group(0, 1, torch.device("cuda", 3), timeout=77.0)
    assert told["how"] == ("cpu:gloo,cuda:nccl",)
    assert told["device_id"] == torch.device("cuda", 3)
    assert told["timeout"] == timedelta(seconds=77)
    assert os.environ[variable] == "false"  # one stream, one order: no reason to warn


def test_after_an_exception_the_group_is_left_alone():
    with pytest.raises(KeyError), distributed_context(num_ranks=1, device="cpu"):
        raise KeyError
    assert dist.is_initialized()


def test_more_stages_than_processes_are_refused_before_a_group_is_made():
    with (
        pytest.raises(UserError, match="1 processes can't hold pipelines of 2 ranks"),
        distributed_context(num_ranks=2, device="cpu"),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:1"),
    ],
)
def test_each_process_of_a_machine_needs_a_gpu_of_its_own(monkeypatch, device, num_gpus, expected):
    fake_accelerators(monkeypatch, "cuda", num_gpus)
    assert str(choose_device(device, local_rank=1, local_world_size=2)) == expected


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_gpus_are_an_error_not_a_run_on_the_cpu(monkeypatch, device):
    fake_accelerators(monkeypatch, "cuda", 1)
    with pytest.raises(UserError, match=f"device`? {device}: this machine shows 1 devices"):
        choose_device(device, local_rank=0, local_world_size=2)
