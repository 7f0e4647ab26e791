"""Steps of a corpus: the sequence of batches does not depend on replicas and workers."""

import itertools
import random

import pytest
import torch

from stageline.corpus.mixture import Mixture
from stageline.corpus.run_sampler import run_sampler
from stageline.data.batches.loader import MicroBatchLoader
from stageline.errors import UserError

BATCH = 12
SIZES = [130, 61, 17]


def _sampler(mixture, *, dp_degree=1, accumulate_steps=1, **options):
    """Return the sampler of a run whose global batch is shared by `dp_degree` replicas."""
    batch_size = mixture.batch_rows // dp_degree
    return run_sampler(
        mixture.sizes,
        batch_size=batch_size,
        step_samples=batch_size * accumulate_steps,
        dp_degree=dp_degree,
        counts=mixture.shares.whole,
        drop_mode=mixture.drop_mode,
        seed=mixture.seed,
        **options,
    )


class _Numbers:
    """Row i is the number i."""

    def __init__(self, mixture):
        self.mixture = mixture

    def __len__(self):
        return sum(SIZES)

    def make_sampler(self, *, batch_size, step_samples, seed, shuffle, **options):
        options["accumulate_steps"] = step_samples // batch_size
        return _sampler(self.mixture, **options)

    def __getitem__(self, row):
        return None, {"id": str(row), "number": row}


def _collate(samples):
    numbers = torch.tensor([[sample["number"]] for _, sample in samples])
    return {"input_ids": numbers, "labels": numbers.clone()}


def _loaded(mixture, num_steps, *, accumulate_steps, **options):
    """Return rows of each step that a loader makes."""
    loader = MicroBatchLoader(
        _Numbers(mixture),
        collate=_collate,
        batch_size=BATCH,
        micro_batch_size=BATCH,
        accumulate_steps=accumulate_steps,
        order="given",
        **options,
    )
    steps = itertools.islice(loader, num_steps)
    return [[int(row) for batch in step for row in batch["labels"][:, 0]] for step in steps]


def _part(mixture, num_steps, *, start_step=0, **options):
    """Return the batches of some steps, and the state behind them; replica r of n has rows r::n."""
    sampler = _sampler(mixture, start_step=start_step, **options)
    shares = list(itertools.islice(sampler.shares(start_step), num_steps))
    rows = [row for step in shares for row in itertools.chain(*zip(*step, strict=True))]
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    return batches, sampler.state_after(start_step + num_steps)


def _whole(mixture, num_batches):
    """Return the batches of a run that nothing interrupts."""
    numbers = range(num_batches)
    return [mixture.batch(*divmod(number, len(mixture))).tolist() for number in numbers]


def test_60_runs_that_stop_anywhere_go_on_exactly():
    """Whatever replicas and accumulation the two parts of a run have; workers: see below."""
    dice = random.Random(5)
    mixtures = [
        Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, drop_mode=mode, seed=9) for mode in range(4)
    ]
    wholes = [_whole(mixture, 100) for mixture in mixtures]
    for _ in range(60):
        mixture, whole = dice.choice(list(zip(mixtures, wholes, strict=True)))
        first, second = (
            {"accumulate_steps": dice.randint(1, 4), "dp_degree": dice.choice([1, 2, 3, 4, 6, 12])}
            for _ in range(2)
        )
        k = dice.randint(0, 20)
        before, position = _part(mixture, k, **first)
        after, _ = _part(mixture, 5, start_step=k, position=position, **second)
        assert before + after == whole[: len(before + after)], (k, first, second)


def test_processes_that_load_change_nothing():
    mixture = Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, drop_mode=3, seed=9)
    before = _loaded(mixture, 7, accumulate_steps=2, num_workers=0)
    position = _sampler(mixture, accumulate_steps=2).state_after(7)
    place = {"start_step": 7, "position": position}
    after = _loaded(mixture, 4, accumulate_steps=3, num_workers=1, **place)
    loaded = [row for step in before + after for row in step]
    assert loaded == [row for batch in _whole(mixture, 26) for row in batch]


def test_a_run_that_goes_on_as_it_was_needs_the_step_alone():
    mixture = Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, seed=1)
    sampler = _sampler(mixture, accumulate_steps=2, dp_rank=1, dp_degree=3)
    whole = list(itertools.islice(sampler.steps(), 40))
    assert whole == [shares[1] for shares in itertools.islice(sampler.shares(), 40)]
    assert list(itertools.islice(sampler.steps(23), 17)) == whole[23:]


def test_an_epoch_of_steps_leaves_no_batch_out():
    """17 batches are 5 steps of 3; the next epoch begins with the 2 that are left."""
    mixture = Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, seed=1, drop_mode="last_ends_drop")
    sampler = _sampler(mixture, accumulate_steps=3)
    assert (len(mixture), len(sampler)) == (18, 6)
    sampler = _sampler(mixture, accumulate_steps=4)
    assert len(sampler) == 4
    assert [sampler.state_after(step)["batch"] for step in (4, 5, 9)] == [16, 2, 0]
    assert [sampler.state_after(step)["epoch"] for step in (4, 5, 9)] == [0, 1, 2]
    rows = [row for step in itertools.islice(sampler.steps(), 9) for row in step]
    for epoch in (rows[: 18 * BATCH], rows[18 * BATCH :]):
        of_type_0 = [row for row in epoch if row < 130]
        assert len(set(of_type_0)) == len(of_type_0) == 18 * 7


def test_replicas_share_no_row_and_get_their_types():
    mixture = Mixture(SIZES, counts=[6, 4, 2], batch=BATCH)
    sampler = _sampler(mixture, accumulate_steps=2, dp_degree=4)
    for shares in itertools.islice(sampler.shares(), 4):
        assert all(len(share) == 6 for share in shares)
        assert len({row for share in shares for row in share}) == 24
        for share in shares:
            for part in (share[:3], share[3:]):
                in_large = sum(row < 130 for row in part)
                assert in_large in (1, 2), "6 of 12 rows are of type 0"


def test_with_batches_of_another_size_as_many_rows_of_the_epoch_are_done():
    position = {"epoch": 1, "batch": 3, "batch_rows": 4}

    def after(step, **options):
        sampler = run_sampler([120], start_step=5, position=position, **options)
        return sampler.num_batches, sampler.state_after(step)

    # a step of 8 is two of those batches; one of 6 is none, so batches have 6 rows from now on
    assert after(5, batch_size=8, step_samples=8) == (2, position)
    assert after(6, batch_size=8, step_samples=8) == (2, {**position, "batch": 5})
    other = {"epoch": 1, "batch": 2, "batch_rows": 6}
    assert after(5, batch_size=6, step_samples=6) == (1, other)
    assert after(6, batch_size=6, step_samples=6) == (1, {**other, "batch": 3})


def test_a_step_must_be_whole_batches_of_the_counts():
    for counts in ((1, 2), (3, 3), (10, 6)):
        with pytest.raises(UserError, match=f"adds up to {sum(counts)} rows"):
            run_sampler([50, 50], batch_size=8, step_samples=8, counts=counts)
    assert run_sampler([50, 50], batch_size=8, step_samples=8, counts=(1, 3)).num_batches == 2
