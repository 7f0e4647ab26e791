"""Which rows belong to which step, against a reference that draws one whole list of rows."""

import itertools

import pytest
import torch

from stageline.data.loader import MicroBatchLoader
from stageline.data.sampler import StepSampler
from stageline.errors import DataError, UserError


class Numbers:
    """Row i is the number i."""

    def __init__(self, count, bad=None):
        self.count = count
        self.bad = bad

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if row == self.bad:
            raise DataError(f"numbers.txt:{row + 1}: bad row")
        return None, {"id": str(row), "number": row}


def _collate(samples):
    numbers = torch.tensor([[sample["number"]] for _, sample in samples])
    return {"input_ids": numbers, "labels": numbers.clone()}


def _loader(count, **options):
    defaults = {"collate": _collate, "batch_size": 4, "micro_batch_size": 2}
    return MicroBatchLoader(Numbers(count), **{**defaults, **options})


def _rows(step):
    """Rows of a step that count."""
    return [int(n) for batch in step for n in batch["labels"][:, 0] if n != -100]


def _take(loader, count):
    return [_rows(step) for step in itertools.islice(loader, count)]


def test_an_epoch_holds_each_row_once_and_the_next_has_another_order():
    sampler = StepSampler(12, step_samples=4, seed=3)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(itertools.chain(*sampler)))
    assert all(sorted(rows) == list(range(12)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert list(sampler) == list(sampler), "the same epoch twice is the same"


def test_seeds_and_epochs_do_not_meet():
    """Seed 1's first epoch is not seed 0's second, as it is where the two are added."""
    orders = {
        (seed, epoch): tuple(StepSampler(50, step_samples=5, seed=seed).order(epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(set(orders.values())) == len(orders)


@pytest.mark.parametrize("dp_degree", [1, 2, 3])
def test_replicas_share_a_step_and_join_to_the_whole(dp_degree):
    whole = StepSampler(26, step_samples=4 * dp_degree, seed=1)
    shares = [
        StepSampler(26, step_samples=4, dp_rank=rank, dp_degree=dp_degree, seed=1)
        for rank in range(dp_degree)
    ]
    for step, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert list(itertools.chain(*parts)) == step


@pytest.mark.parametrize("dp_degree", [2, 3])
def test_replicas_part_each_epoch_among_them(dp_degree):
    seen = []
    for epoch in range(2):
        shares = []
        for rank in range(dp_degree):
            sampler = StepSampler(24, step_samples=4, dp_rank=rank, dp_degree=dp_degree, seed=1)
            sampler.set_epoch(epoch)
            shares.append(set(itertools.chain(*sampler)))
        assert sum(map(len, shares)) == 24 and set.union(*shares) == set(range(24))
        seen.append(shares)
    assert seen[0] != seen[1], "another epoch parts them otherwise"


def test_training_goes_on_from_any_step():
    full = _take(_loader(10), 7)
    for start in range(6):
        assert _take(_loader(10, start_step=start), 7 - start) == full[start:]
    assert [len(rows) for rows in full] == [4] * 7, "10 rows give 2 whole steps an epoch"


def test_training_needs_one_whole_step():
    with pytest.raises(UserError, match="7 rows.* takes 16 .*--batch-size"):
        StepSampler(7, step_samples=8, dp_degree=2)


@pytest.mark.parametrize(("count", "dp_degree"), [(9, 1), (8, 1), (9, 2), (1, 2), (3, 2)])
def test_evaluation_sees_each_row_once_in_equal_steps(count, dp_degree):
    seen = []
    lengths = set()
    for rank in range(dp_degree):
        loader = _loader(count, eval=True, shuffle=False, dp_rank=rank, dp_degree=dp_degree)
        steps = list(loader)
        assert len(steps) == len(loader)
        lengths.add(len(steps))
        for step in steps:
            assert len(step) == 2 and all(len(batch["input_ids"]) == 2 for batch in step)
            seen += _rows(step)
    assert sorted(seen) == list(range(count))
    assert len(lengths) == 1, "all replicas take as many steps"
    if dp_degree == 1:
        assert seen == list(range(count))


def test_micro_batches_are_neighbours_in_the_drawn_order():
    loader = _loader(24, batch_size=6, micro_batch_size=3, accumulate_steps=2, seed=5)
    drawn = next(loader.sampler.steps())
    step = next(iter(loader))
    assert len(step) == 4
    assert [batch["input_ids"][:, 0].tolist() for batch in step] == [
        drawn[start : start + 3] for start in range(0, 12, 3)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_change_nothing(num_workers):
    assert _take(_loader(21, num_workers=num_workers), 8) == _take(_loader(21), 8)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_keeps_its_message(num_workers):
    dataset = Numbers(8, bad=6)
    loader = MicroBatchLoader(
        dataset,
        collate=_collate,
        batch_size=4,
        micro_batch_size=2,
        shuffle=False,
        num_workers=num_workers,
    )
    with pytest.raises(DataError) as caught:
        list(itertools.islice(loader, 2))
    assert str(caught.value) == "numbers.txt:7: bad row"


def test_loading_draws_nothing_from_the_global_generator():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    _take(_loader(12), 2)
    assert torch.equal(torch.rand(3), expected)


def test_rows_that_do_not_fall_into_micro_batches():
    with pytest.raises(UserError, match="6 rows .*micro-batches of 4"):
        _loader(20, batch_size=6, micro_batch_size=4)
