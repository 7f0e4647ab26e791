"""Yields, for each optimizer step, the list of its micro-batches; each is made by the collate part.

Micro-batches are never cut out of a larger tensor: image tensors have other first dimensions.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from stageline.data.batches.batch import MicroBatch
from stageline.data.batches.sampler import (
    StepSampler,
    StreamSampler,
    check_batch_sizes,
    group_size_of,
    has_sampler,
    is_stream,
    some_rows,
)
from stageline.data.batches.step_maker import PackedStepMaker, StepMaker, end_with_rank
from stageline.device import accelerators
from stageline.errors import UserError
from stageline.seeds import derive_seed

NUM_EXAMPLES = 4  # micro-batches that are looked at
_CAN_FORK = sys.platform == "linux"


class MicroBatchLoader:
    """Loads the micro-batches of a replica; the same on all ranks of its pipeline.

    In training it continues without end; in evaluation it ends after each row came once, and the
    last steps are filled up with rows whose labels are all -100, so that each step has the same
    number of micro-batches. Packed steps have numbers of their own.

    Args:
        dataset: map-style, `dataset[i] -> (images, sample)`; groups, streams and sets with a
            sampler of their own are described in sampler.py.
        collate: a list of those -> one micro-batch; what can be sorted and packed says
            collate_part.py.
        batch_size, accumulate_steps: rows of one optimizer step are their product.
        num_workers: processes that load ahead, a step each; 0 loads in this one.
        pins: puts tensors where an accelerator fetches them while it computes.
        start_step: the first optimizer step of training, counted over all epochs.
        position: what `state_after` gave for the step before, where it is known.
        eval: each row once, in the order of the dataset unless `shuffle`.
        pads: fills the last step of an epoch with its first rows; else those left over are dropped.
        order: `sorted` puts rows of near-equal length together, and cheap micro-batches first
            and last; `given` keeps the order in which rows were drawn.
        packing: tokens of a row that holds several samples; None for one sample a row.
        legal_counts, agree: for packing, see `PackedStepMaker`.
        facts: micro-batch -> what goes into it besides, see `StageModel.host_facts`; not where
            workers are not forked, which would get a copy of the model.
        maker: what makes a step of rows that are not packed.
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
        pins: bool = False,
        start_step: int = 0,
        position: Any = None,
        eval: bool = False,
        pads: bool = False,
        order: Literal["sorted", "given"] = "sorted",
        packing: int | None = None,
        legal_counts: Callable[[int], int] = int,
        agree: Callable[[int, int], int] | None = None,
        facts: Callable[[MicroBatch], MicroBatch] | None = None,
        maker: type[StepMaker] = StepMaker,
    ) -> None:
        step_samples = batch_size * accumulate_steps
        if step_samples % micro_batch_size:
            raise UserError(
                f"{step_samples} rows of a step (`batch_size` {batch_size} x `accumulate_steps` "
                f"{accumulate_steps}) do not fall into micro-batches of {micro_batch_size}. Choose "
                "a `micro_batch_size` that divides it."
            )
        group_size = group_size_of(dataset)
        check_batch_sizes(
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            group_size=group_size,
            is_packed=packing is not None,
        )
        drawn: dict[str, Any] = {"step_samples": step_samples, "seed": seed, "shuffle": shuffle}
        drawn |= {"dp_rank": dp_rank, "dp_degree": dp_degree}
        if has_sampler(dataset) and not eval:
            drawn |= {"batch_size": batch_size, "start_step": start_step, "position": position}
            self.sampler = dataset.make_sampler(**drawn)
        else:
            sampler = StreamSampler if is_stream(dataset) else StepSampler
            drawn |= {"eval": eval, "pads": pads and not eval, "group_size": group_size}
            self.sampler = sampler(len(dataset), **drawn)
        options: dict[str, Any] = {
            "collate": collate,
            "micro_batch_size": micro_batch_size,
            "dp_rank": dp_rank,
            "is_sorted": order == "sorted",
            "seed": derive_seed(seed, "held out" if eval else "rows"),
            "group_size": group_size,
            "facts": facts if _CAN_FORK or not num_workers else None,
        }
        if packing is not None:
            options |= {"capacity": packing, "legal_counts": legal_counts, "agree": agree}
            maker = PackedStepMaker
        self.step_maker = maker(dataset, **options)
        self.num_workers = num_workers
        self.pins = pins and bool(accelerators())
        self.start_step, self.eval = start_step, eval

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch."""
        return len(self.sampler)

    def state_after(self, step: int) -> Any:
        """Return the sampler's state after `step` steps; None if the step number is enough."""
        told = getattr(self.sampler, "state_after", None)
        return None if told is None else told(step)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        for made in self._steps:
            if isinstance(made, Exception):
                try:
                    raise made
                finally:
                    del made  # its traceback holds this frame, and so it would hold itself
            yield made

    @functools.cached_property
    def _steps(self) -> DataLoader:
        """Loads steps; kept, so that the workers of one evaluation serve the next."""
        return DataLoader(
            self.step_maker,
            batch_size=None,
            sampler=_Shares(self.sampler, None if self.eval else self.start_step),
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            worker_init_fn=end_with_rank,
            # some processors cannot be pickled; Python 3.14 would no longer fork by itself
            multiprocessing_context="fork" if self.num_workers and _CAN_FORK else None,
            # a step is made while the one before is computed; more would hold more pixels
            prefetch_factor=1 if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.pins,
            # It needs its own generator: drawing from the global one would shift dropout.
            generator=torch.Generator(),
        )


class _Shares:
    """Number and rows of each step, of all replicas: the sampler of a DataLoader.

    It does not hold the loader: in a cycle of references the queues of workers are finalised
    before the DataLoader can tell the workers to end, and it waits five seconds for each.
    """

    def __init__(self, sampler: Any, start_step: int | None) -> None:
        self._sampler = sampler
        self._start_step = start_step  # None: of one evaluation

    def __iter__(self) -> Iterator[tuple[int, list[list[int | None]]]]:
        if self._start_step is None:
            return enumerate(self._sampler.epoch_shares())
        return enumerate(self._sampler.shares(self._start_step), self._start_step)


def _as_it_is(step: Any) -> Any:
    return step


def example_micro_batch(
    dataset: Any, collate: Callable[[Sequence[Any]], MicroBatch], num_rows: int, *, seed: int = 0
) -> MicroBatch:
    """Return the longest of the first few micro-batches that a run with this seed would see.

    Where some have images, the longest of those. `collate` is of stage 0, so that pixels are in.
    """
    if has_sampler(dataset):  # its batches may have to be of one size
        dataset = some_rows(dataset, NUM_EXAMPLES * num_rows)
    if num_rows % group_size_of(dataset):  # a list of rows need not keep groups together
        dataset = [dataset[row] for row in range(min(len(dataset), NUM_EXAMPLES * num_rows))]
    loader = MicroBatchLoader(
        dataset, collate=collate, batch_size=num_rows, micro_batch_size=num_rows, seed=seed
    )
    examples = [step[0] for step in itertools.islice(loader, NUM_EXAMPLES)]
    with_pixels = [one for one in examples if any(name.startswith("pixel") for name in one)]
    return max(with_pixels or examples, key=lambda batch: batch["input_ids"].shape[1])
