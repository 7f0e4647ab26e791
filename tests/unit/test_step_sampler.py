"""The rows of each step, against the rules written out."""

import itertools
from collections import Counter

import pytest
from torch.utils.data import DistributedSampler

from stageline.data.batches.sampler import (
    StepSampler,
    StreamSampler,
    expand,
    full_groups,
    some_rows,
    whole_groups,
)
from stageline.errors import UserError


def steps_of(sampler, count, start=0):
    return list(itertools.islice(sampler.shares(start), count))


def joined(shares):
    return [row for share in shares for row in share]


@pytest.mark.parametrize(("dp_degree", "group_size"), [(2, 1), (1, 3)])
def test_an_epoch_has_whole_steps_of_rows_that_come_once(dp_degree, group_size):
    sampler = StepSampler(51, step_samples=6, dp_degree=dp_degree, group_size=group_size)
    rows_of_step = 6 * dp_degree
    assert len(sampler) == 51 // rows_of_step
    steps = steps_of(sampler, 3 * len(sampler))
    orders = []
    for epoch in range(3):
        own = steps[epoch * len(sampler) : (epoch + 1) * len(sampler)]
        rows = [row for shares in own for row in joined(shares)]
        assert len(set(rows)) == len(rows) == rows_of_step * len(sampler)
        assert rows == sampler.order(epoch)[: len(rows)] != sorted(rows)
        for first in range(0, len(rows), group_size):
            group = rows[first : first + group_size]
            assert group == list(range(group[0], group[0] + group_size))
            assert group[0] % group_size == 0
        orders.append(tuple(rows))
        assert all(len(share) == 6 for shares in own for share in shares)
    assert len(set(orders)) == 3, "another order in each epoch"
    for start in (1, len(sampler), 2 * len(sampler) - 1):
        assert steps_of(sampler, 4, start) == steps_of(sampler, start + 4)[start:]


def test_replicas_join_to_the_steps_of_one():
    alone = StepSampler(40, step_samples=8, seed=3)
    for degree in (2, 4):
        several = StepSampler(40, step_samples=8 // degree, seed=3, dp_degree=degree)
        assert len(several) == len(alone) == 5
        ours = [joined(shares) for shares in steps_of(several, 12)]
        assert ours == [joined(shares) for shares in steps_of(alone, 12)]


@pytest.mark.parametrize(("num_samples", "group_size"), [(2, 1), (10, 2), (12, 1), (14, 2)])
def test_padding_is_that_of_distributed_sampler(num_samples, group_size):
    """Whole steps are to rows what torch's replicas are: the first rows fill up the rest."""
    step, degree = 4, 3
    sampler = StepSampler(
        num_samples, step_samples=step, dp_degree=degree, group_size=group_size, pads=True
    )
    for epoch in range(2):
        start = epoch * len(sampler)
        steps = steps_of(sampler, len(sampler), start)
        ours = [row for shares in steps for row in joined(shares)]
        order = sampler.order(epoch)
        torch_sampler = DistributedSampler(order, step * degree, 0, shuffle=False)
        assert len(ours) == torch_sampler.total_size
        for rank in range(step * degree):
            theirs = DistributedSampler(order, step * degree, rank, shuffle=False)
            assert ours[rank :: step * degree] == [order[place] for place in theirs]
        assert steps_of(sampler, 1, start + len(sampler) - 1) == steps[-1:]
    dropping = StepSampler(
        max(num_samples, 12), step_samples=step, dp_degree=degree, group_size=group_size
    )
    full = sampler.num_samples // (step * degree)
    if full:
        assert steps_of(sampler, full) == steps_of(dropping, full)


def test_epochs_of_neighbouring_seeds_are_unrelated():
    orders = [
        tuple(StepSampler(30, step_samples=30, seed=seed).order(epoch))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16


def test_without_shuffling_rows_come_as_they_lie():
    sampler = StepSampler(7, step_samples=2, shuffle=False)
    assert steps_of(sampler, 4) == [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 1]]]


@pytest.mark.parametrize("num_samples", [1, 8, 9])
def test_an_evaluation_has_each_row_once_and_fills_up_with_none(num_samples):
    sampler = StepSampler(num_samples, step_samples=2, dp_degree=2, eval=True, shuffle=False)
    steps = list(sampler.epoch_shares())
    assert len(steps) == len(sampler) == (num_samples + 3) // 4
    rows = [row for shares in steps for row in joined(shares)]
    assert rows == [*range(num_samples), *[None] * (4 * len(steps) - num_samples)]


def test_too_few_rows_are_told():
    assert len(StepSampler(8, step_samples=4, dp_degree=2)) == 1
    with pytest.raises(UserError, match="has 7 rows, one optimizer step takes 8"):
        StepSampler(7, step_samples=4, dp_degree=2)


def test_a_stream_has_no_end_and_each_position_once():
    sampler = StreamSampler(100, step_samples=2, dp_degree=3)
    assert steps_of(sampler, 2) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert steps_of(sampler, 1, 50) == [[[300, 301], [302, 303], [304, 305]]]


def test_rows_of_groups():
    assert expand([2, 0], 3) == [6, 7, 8, 0, 1, 2]
    assert whole_groups([7, 1, 6], 3) == [0, 1, 2, 6, 7, 8]
    assert full_groups([8, 7, 6, 5, 3, 0, 1, 2], 3) == [0, 1, 2, 6, 7, 8]


def test_some_rows_are_spread_over_the_set():
    chosen = list(some_rows(range(100), 4).indices)
    assert [row // 25 for row in chosen] == [0, 1, 2, 3], "one of each quarter"
    assert list(some_rows(range(3), 9).indices) == [0, 1, 2]
    for period in (2, 3, 4, 8):  # rows take turns: all kinds are there, about as often
        kinds = Counter(row % period for row in some_rows(range(960), 240).indices)
        assert len(kinds) == period and max(kinds.values()) < 1.25 * min(kinds.values()), kinds
