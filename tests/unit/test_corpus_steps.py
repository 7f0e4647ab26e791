"""Steps of a corpus: the sequence of batches does not depend on who shares and loads them."""

import itertools
import random
import tracemalloc

import numpy
import pytest
import torch

from stageline.corpus import mixture as mixture_module
from stageline.corpus.mixture import Mixture
from stageline.corpus.steps import CorpusSampler
from stageline.data.loader import MicroBatchLoader
from stageline.errors import UserError

BATCH = 12
SIZES = [130, 61, 17]


class _Numbers:
    """Row i is the number i."""

    def __len__(self):
        return sum(SIZES)

    def __getitem__(self, row):
        return None, {"id": str(row), "number": row}


def _collate(samples):
    numbers = torch.tensor([[sample["number"]] for _, sample in samples])
    return {"input_ids": numbers, "labels": numbers.clone()}


def _loaded(sampler, num_steps, *, start_step, num_workers):
    """Rows of each step that a loader with this sampler makes."""
    loader = MicroBatchLoader(
        _Numbers(),
        collate=_collate,
        batch_size=sampler.batch_size,
        micro_batch_size=sampler.batch_size,
        accumulate_steps=sampler.accumulate_steps,
        dp_rank=sampler.dp_rank,
        dp_degree=sampler.dp_degree,
        num_workers=num_workers,
        start_step=start_step,
        order="given",
    )
    loader.sampler = sampler
    steps = itertools.islice(loader, num_steps)
    return [[int(row) for batch in step for row in batch["labels"][:, 0]] for step in steps]


def _batches(loaded, *, accumulate_steps, dp_degree):
    """The global batches, from what each replica loaded: replica r has rows r::n of each."""
    made = []
    for shares in zip(*loaded, strict=True):
        size = BATCH // dp_degree
        for number in range(accumulate_steps):
            batch = numpy.zeros(BATCH, dtype=int)
            for replica, share in enumerate(shares):
                batch[replica::dp_degree] = share[number * size : (number + 1) * size]
            made.append(batch.tolist())
    return made


def _samplers(mixture, *, accumulate_steps, dp_degree, **start):
    return [
        CorpusSampler(
            mixture,
            batch_size=BATCH // dp_degree,
            accumulate_steps=accumulate_steps,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
            **start,
        )
        for dp_rank in range(dp_degree)
    ]


def _part(mixture, num_steps, *, start_step=0, **options):
    """The batches of some steps as all replicas get them, and the state behind them."""
    samplers = _samplers(mixture, start_step=start_step, **options)
    got = [list(itertools.islice(sampler.steps(start_step), num_steps)) for sampler in samplers]
    options = {name: options[name] for name in ("accumulate_steps", "dp_degree")}
    return _batches(got, **options), samplers[-1].state_after(start_step + num_steps)


def _whole(mixture, num_batches):
    """The batches of a run that nothing interrupts."""
    numbers = range(num_batches)
    return [mixture.batch(*divmod(number, len(mixture))).tolist() for number in numbers]


def test_200_runs_that_stop_anywhere_go_on_exactly():
    """Whatever replicas and accumulation the two parts of a run have; workers: see below."""
    dice = random.Random(5)
    mixtures = [
        Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, drop_mode=mode, seed=9) for mode in range(4)
    ]
    for _ in range(200):
        mixture = dice.choice(mixtures)
        first, second = (
            {"accumulate_steps": dice.randint(1, 4), "dp_degree": dice.choice([1, 2, 3, 4, 6, 12])}
            for _ in range(2)
        )
        k = dice.randint(0, 20)
        before, state = _part(mixture, k, **first)
        after, _ = _part(mixture, 5, start=state, start_step=k, **second)
        assert before + after == _whole(mixture, len(before + after)), (k, first, second)


@pytest.mark.parametrize("num_workers", [(0, 0), (0, 2)])
def test_processes_that_load_change_nothing(num_workers):
    mixture = Mixture(SIZES, counts=[7, 4, 1], batch=BATCH, drop_mode=3, seed=9)
    options = {"accumulate_steps": 2, "dp_degree": 1}
    (sampler,) = _samplers(mixture, **options)
    before = _loaded(sampler, 7, start_step=0, num_workers=num_workers[0])
    start = {"start": sampler.state_after(7), "start_step": 7}
    options["accumulate_steps"] = 3
    (sampler,) = _samplers(mixture, **options, **start)
    after = _loaded(sampler, 4, start_step=7, num_workers=num_workers[1])
    loaded = _batches([before], accumulate_steps=2, dp_degree=1)
    loaded += _batches([after], accumulate_steps=3, dp_degree=1)
    assert loaded == _whole(mixture, len(loaded)) and len(loaded) == 26


def test_a_run_that_goes_on_as_it_was_needs_the_step_alone():
    mixture = Mixture(SIZES, batch=BATCH, seed=1)
    sampler = CorpusSampler(mixture, batch_size=4, accumulate_steps=2, dp_rank=1, dp_degree=3)
    whole = list(itertools.islice(sampler.steps(), 40))
    assert list(itertools.islice(sampler.steps(23), 17)) == whole[23:]


def test_an_epoch_of_steps_leaves_no_batch_out():
    """17 batches are 5 steps of 3; the next epoch begins with the 2 that are left."""
    mixture = Mixture(SIZES, batch=BATCH, seed=1)
    sampler = CorpusSampler(mixture, batch_size=BATCH, accumulate_steps=3)
    assert (len(mixture), len(sampler)) == (17, 5)
    steps = [share for epoch in range(4) for share in _epoch(sampler, epoch)]
    assert steps == list(itertools.islice(sampler.steps(), 20))
    in_first = [row for step in steps for row in step][: 17 * BATCH]
    assert len(set(in_first)) == 17 * BATCH
    assert sampler.state_after(5) == (0, 15)
    assert sampler.state_after(6) == (1, 1)


def _epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def test_replicas_share_no_row_and_get_their_types():
    mixture = Mixture(SIZES, counts=[6, 4, 2], batch=BATCH)
    sampler = CorpusSampler(mixture, batch_size=3, accumulate_steps=2, dp_degree=4)
    for shares in itertools.islice(sampler.shares(), 8):
        assert all(len(share) == 6 for share in shares)
        assert len({row for share in shares for row in share}) == 24
        for share in shares:
            first, second = (numpy.array(part) for part in (share[:3], share[3:]))
            for part in (first, second):
                in_large = (part < 130).sum()
                assert in_large in (1, 2), "6 of 12 rows are of type 0"


def test_a_late_step_of_a_billion_rows_takes_the_work_of_one(monkeypatch):
    """No replay, no list of rows: as many places are computed as the step has rows."""
    computed = []
    permute = mixture_module.permute

    def counted(places, *others):
        computed.append(len(places))
        return permute(places, *others)

    monkeypatch.setattr(mixture_module, "permute", counted)
    tracemalloc.start()
    mixture = Mixture([7 * 10**8, 3 * 10**8 - 5, 5], weights=[0.7, 0.29, 0.01], batch=64)
    sampler = CorpusSampler(mixture, batch_size=32, accumulate_steps=2, dp_degree=2)
    shares = next(sampler.shares(10**7))
    state = sampler.state_after(10**7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(computed) == sum(map(len, shares)) == 128
    assert peak < 1_000_000
    assert state == divmod(2 * 10**7, len(mixture))


def test_batches_of_another_size_are_refused():
    mixture = Mixture(SIZES, batch=BATCH)
    with pytest.raises(UserError, match=r"2 data parallel replicas of 4 rows .* of 8, .* of 12"):
        CorpusSampler(mixture, batch_size=4, dp_degree=2)
    with pytest.raises(UserError, match=r"17 batches, one optimizer step takes 18"):
        CorpusSampler(mixture, batch_size=BATCH, accumulate_steps=18)
