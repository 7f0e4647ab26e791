"""Random numbers of data and dropout: equal with other workers and ranks, and from any step."""

import itertools
import random

import numpy
import pytest
import torch

from stageline.data.batches.batch import IGNORE
from stageline.data.batches.collate_part import EncodedSample, collate_part
from stageline.data.batches.loader import MicroBatchLoader
from tests.helpers.small_run import Job

NUM_STEPS = 6  # this makes two epochs


class Crops:
    """Rows that draw their length, as an augmentation may, from every generator there is."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        draws = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return None, {"row": row, "draws": draws, "length": 3 + random.randrange(12)}


def encode(images, sample):
    return EncodedSample(images, sample, [], sample["length"], [])


def packed(rows):
    return masked([sample for row in rows for sample in row])


@collate_part(encode=encode, pack=packed)
def masked(rows):
    """A collate part that draws what it hides."""
    width = max(sample["length"] for _, sample in rows)
    noise = [random.random(), numpy.random.rand()]
    return {
        "input_ids": torch.tensor([[sample["row"]] * width for _, sample in rows]),
        "labels": torch.where(torch.rand(len(rows), width) < 0.5, 1, IGNORE),
        "draws": torch.tensor([sample["draws"] + noise for _, sample in rows]),
    }


def steps_of(count=NUM_STEPS, **options):
    options = {"batch_size": 8, "micro_batch_size": 2, "seed": 5, **options}
    return list(itertools.islice(MicroBatchLoader(Crops(), collate=masked, **options), count))


def flat(steps):
    return [tensor for step in steps for batch in step for _, tensor in sorted(batch.items())]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"order": "given"}, {"packing": 16}])
def test_e04_rows_that_draw_are_equal_with_0_and_2_workers(options):
    expected = flat(steps_of(**options))
    assert not torch.equal(flat(steps_of(**options, seed=6))[0], expected[0])
    torch.rand(9)
    assert_equal(flat(steps_of(**options, num_workers=2)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"packing": 16}])
def test_e04_rows_that_draw_are_equal_from_a_later_step(options, num_workers):
    expected = steps_of(**options)
    later = steps_of(NUM_STEPS - 3, start_step=3, num_workers=num_workers, **options)
    assert_equal(flat(later), flat(expected[3:]))
    # another step draws other numbers for the same row
    assert not torch.equal(expected[0][0]["draws"], expected[3][0]["draws"])


def test_e04_replicas_join_to_the_batch_of_one():
    whole = steps_of(order="given")
    halves = [steps_of(order="given", batch_size=4, dp_rank=rank, dp_degree=2) for rank in range(2)]
    joined = [first + second for first, second in zip(*halves, strict=True)]
    assert_equal(flat(joined), flat(whole))


def test_e04_packed_replicas_agree_on_rows_that_draw_their_length():
    """Each computes the lengths of the other's rows, which are drawn as well."""
    options = {"batch_size": 4, "packing": 16, "dp_degree": 2}
    counts = [[len(step) for step in steps_of(dp_rank=rank, **options)] for rank in range(2)]
    assert counts[0] == counts[1] and len(set(counts[0])) > 1


# -- dropout -----------------------------------------------------------------------------------

LORA = ("--llm-lora-num", 1, "--lora.rank", 4, "--lora.dropout", 0.3, "--parts.lm_head.frozen")


def test_e04_e07_the_entry_file_draws_the_same_on_any_ranks_and_workers(tmp_path):
    job = Job(tmp_path, num_layers=4)
    other = "--num-stages 4 --schedule zbv --num-workers 2 --gradient-checkpointing".split()
    runs = {"one": (1, ()), "two": (2, other), "without": (1, ("--lora.dropout", 0))}
    for name, (ranks, options) in runs.items():
        job.train(name, "--total-steps", 2, "--save-steps", 0, *LORA, *options, ranks=ranks)
    assert job.losses("one") == job.losses("two") != job.losses("without")
