"""A user's schedule, read from CSV: torch's spelling, and one clear error for a typo."""

import csv

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from stageline.errors import UserError
from stageline.pipeline.plan import add_transfers, drop_dead_backward, grad_flow
from stageline.pipeline.schedules import make_schedule
from stageline.pipeline.topology import resolve_topology

GOOD = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def write(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "ours, torchs, with_comms", [("zbv", "ZBVZeroBubble", False), ("dualpipev", "DualPipeV", True)]
)
def test_what_torch_writes_is_read(ours, torchs, with_comms, tmp_path):
    rows = get_schedule_ops(torchs, 2, 4, 2, with_comms=with_comms)
    path = tmp_path / "torch.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["" if a is None else str(a) for a in row] for row in rows])
    schedule = make_schedule(str(path), num_ranks=2)
    assert schedule.orders(4) == make_schedule(ours, num_ranks=2).orders(4)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert schedule.splits_backward


def test_our_own_order_in_a_file_is_the_same_schedule(tmp_path):
    made = make_schedule("eager_1f1b", num_ranks=3)
    path = tmp_path / "ours.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(made.orders(6))
    read = make_schedule(str(path), num_ranks=3)
    assert read.orders(6) == made.orders(6) and read.rank_of_stage == made.rank_of_stage


def test_a_file_gives_stages_and_micro_batches(tmp_path):
    path = write(tmp_path, GOOD)
    topology = resolve_topology(schedule=path, num_stages=2)
    assert topology.num_ranks == 2 and not topology.schedule.splits_backward
    with pytest.raises(UserError, match="it runs 2 and no other number"):
        topology.schedule.check(4)
    with pytest.raises(UserError, match="has 2 stages on 2 ranks, not --num-stages 4"):
        resolve_topology(schedule=path, num_stages=4)
    with pytest.raises(UserError, match="rows for 2 ranks, the run has 4"):
        make_schedule(path, num_ranks=4)
    assert resolve_topology(schedule=path, world_size=4).dp_degree == 2


def test_ranks_of_a_file_may_hold_different_numbers_of_stages(tmp_path):
    path = write(tmp_path, "0F0,0F1,1F0,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1\n")
    topology = resolve_topology(schedule=path)
    assert (topology.num_stages, topology.num_ranks) == (3, 2)
    assert [topology.schedule.stages_of(rank) for rank in (0, 1)] == [[0, 1], [2]]
    flow = grad_flow([True] * 3)
    add_transfers(topology.schedule.orders(2), topology.schedule.rank_of_stage, flow)


@pytest.mark.parametrize(
    "text, reason",
    [
        (GOOD.replace(",1B1", ""), "stage 1 does F with micro-batch 1"),
        (GOOD.replace("1B1", "1B2"), "stage 0 does nothing with micro-batch 2"),
        (GOOD.replace("0F1", "0X1"), "row 1: '0X1' is not an action"),
        (GOOD.replace("1F1", "0F1"), "stage 0 stands in rows 1 and 2"),
        (GOOD.replace("1F", "2F").replace("1B", "2B"), "no action of stage 1"),
    ],
)
def test_slips(text, reason, tmp_path):
    with pytest.raises(UserError, match=reason) as caught:
        make_schedule(write(tmp_path, text), num_ranks=2)
    assert "mine.csv" in str(caught.value)


def test_a_circle_of_waits(tmp_path):
    path = write(tmp_path, "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    schedule = make_schedule(path, num_ranks=2)
    flow = grad_flow([True, True])
    with pytest.raises(UserError, match="waits for itself: ranks stand at 0B0, 1F1"):
        add_transfers(drop_dead_backward(schedule.orders(2), flow), schedule.rank_of_stage, flow)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        make_schedule(str(tmp_path / "none.csv"), num_ranks=2)
