"""Yields, for each optimizer step, the list of its micro-batches; each is made by the collate part.

Micro-batches are never cut out of a larger tensor: image tensors have other first dimensions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from stageline.data.batch import IGNORE
from stageline.data.sampler import StepSampler
from stageline.errors import UserError

MicroBatch = dict[str, torch.Tensor]


class MicroBatchLoader:
    """Loads the micro-batches of a replica; the same on all ranks of its pipeline.

    In training it goes on without end; in evaluation it ends after each row came once. The last
    steps of an evaluation are filled up with rows whose labels are all -100, so that each step
    has the same number of micro-batches.

    Args:
        dataset: map-style, `dataset[i] -> (images, sample)`.
        collate: a list of those -> one micro-batch.
        batch_size, accumulate_steps: rows of one optimizer step are their product.
        num_workers: processes that load ahead; 0 loads in this one.
        start_step: the first optimizer step of training, counted over all epochs.
        eval: each row once, in the order of the dataset unless `shuffle`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[Sequence[Any]], MicroBatch],
        batch_size: int,
        micro_batch_size: int,
        accumulate_steps: int = 1,
        dp_rank: int = 0,
        dp_degree: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        start_step: int = 0,
        eval: bool = False,
    ) -> None:
        step_samples = batch_size * accumulate_steps
        if step_samples % micro_batch_size:
            raise UserError(
                f"{step_samples} rows of a step (--batch-size {batch_size} x --accumulate-steps "
                f"{accumulate_steps}) do not fall into micro-batches of {micro_batch_size}. Equal "
                "ones were expected, because each travels through the stages alone: choose a "
                "--micro-batch-size that divides it."
            )
        self.sampler = StepSampler(
            len(dataset),
            step_samples=step_samples,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
            seed=seed,
            shuffle=shuffle,
            eval=eval,
        )
        self.dataset = dataset
        self.collate = collate
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = step_samples // micro_batch_size
        self.num_workers = num_workers
        self.start_step = start_step
        self.eval = eval

    def __len__(self) -> int:
        """Optimizer steps of one epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        loader = DataLoader(
            _Rows(self.dataset),
            batch_sampler=_MicroRows(self),
            collate_fn=_Collate(self.collate),
            num_workers=self.num_workers,
            # of its own: drawing from the global generator would shift dropout
            generator=torch.Generator(),
        )
        step: list[MicroBatch] = []
        for made in loader:
            if isinstance(made, Exception):
                raise made
            step.append(made)
            if len(step) == self.num_micro_batches:
                yield step
                step = []


class _MicroRows:
    """Row numbers of one micro-batch after the other: the batch sampler of a DataLoader."""

    def __init__(self, loader: MicroBatchLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int | None]]:
        loader = self._loader
        sampler = loader.sampler
        for rows in iter(sampler) if loader.eval else sampler.steps(loader.start_step):
            for start in range(0, len(rows), loader.micro_batch_size):
                yield rows[start : start + loader.micro_batch_size]


class _Rows(Dataset):
    """(the row, whether it counts); None stands for row 0 as a filler. Errors come as values."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, row: int | None) -> Any:
        try:
            return self._dataset[row or 0], row is not None
        except Exception as error:
            return error  # raised in a worker, its traceback would bury the message


class _Collate:
    """Calls the collate part; rows that only fill up get labels of -100."""

    def __init__(self, collate: Callable[[Sequence[Any]], MicroBatch]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> MicroBatch | Exception:
        for row in rows:
            if isinstance(row, Exception):
                return row
        try:
            batch = self._collate([row for row, _ in rows])
        except Exception as error:
            return error
        counts = torch.tensor([counts for _, counts in rows])
        batch["labels"][~counts] = IGNORE
        return batch
