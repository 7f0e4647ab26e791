"""A micro-batch to look at before a run: what the planner measures with."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from stageline.data.groups import some_rows
from stageline.data.loader import MicroBatch, MicroBatchLoader
from stageline.data.sampler import has_sampler

NUM_EXAMPLES = 4


def example_micro_batch(
    dataset: Any,
    collate: Callable[[Sequence[Any]], MicroBatch],
    num_rows: int,
    *,
    seed: int = 0,
) -> MicroBatch:
    """The longest of the first few micro-batches that a run with this seed would see.

    Where some have images, the longest of those: a tower takes time and memory for them alone.

    Args:
        collate: of stage 0, so that pixels are in.
    """
    if has_sampler(dataset):  # whose batches may have to be of one size
        dataset = some_rows(dataset, NUM_EXAMPLES * num_rows)
    loader = MicroBatchLoader(
        dataset, collate=collate, batch_size=num_rows, micro_batch_size=num_rows, seed=seed
    )
    examples = [step[0] for step in itertools.islice(loader, NUM_EXAMPLES)]
    return max(examples, key=lambda batch: (_has_pixels(batch), batch["input_ids"].shape[1]))


def _has_pixels(batch: MicroBatch) -> bool:
    return any(name.startswith("pixel") for name in batch)
