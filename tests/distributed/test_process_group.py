"""The mesh: which rank is which stage of which replica; and a process that is alone."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stageline.distributed.process_group import (
    distributed_context,
    open_channels,
    warm_up,
)
from stageline.errors import UserError
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


def test_more_stages_than_processes_are_refused_before_a_group_is_made():
    with (
        pytest.raises(UserError, match="1 processes can't hold pipelines of 2 ranks"),
        distributed_context(num_ranks=2, device="cpu"),
    ):
        pass
    assert not dist.is_initialized()
