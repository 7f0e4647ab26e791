"""Evaluation inside training: the loss on held-out samples, through the same stages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.replicas import Replicas

IGNORE = -100


@dataclass
class EvalResult:
    """Figures over the whole evaluation set.

    Attributes:
        loss: the mean over supervised tokens.
        token_accuracy: the share of supervised tokens that greedy prediction hits, given the true
            tokens before them.
        num_targets: supervised tokens.
        predicted: token ids predicted at the supervised places, a list per row, of the first
            `keep` rows of the dataset; on every rank.
    """

    loss: float
    token_accuracy: float
    num_targets: int
    predicted: list[list[int]] = field(default_factory=list)


def evaluate(
    runner: PipelineRunner,
    batches: Iterable[Sequence[MicroBatch]],
    *,
    loss_fn: Callable[..., torch.Tensor],
    keep: int = 0,
    replicas: Replicas | None = None,
) -> EvalResult:
    """Runs all batches forward only.

    Args:
        batches: lists of micro-batches of this replica; rows without a label weigh nothing.
        keep: how many rows' predicted tokens to return.
        replicas: share the batches: each step's first rows are the first replica's.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # loss, hits, targets
    predicted: list[tuple[int, list[int]]] = []  # with the step
    num_steps = 0
    one = torch.ones((), device=runner.device)

    def on_output(logits: torch.Tensor, batch: MicroBatch) -> None:
        labels = batch["labels"][:, 1:]
        is_target = labels != IGNORE
        if not bool(is_target.any()):
            return
        guesses = logits[:, :-1].argmax(dim=-1)
        sums[0] += loss_fn(logits, batch, num_targets=one).double().cpu()
        sums[1] += ((guesses == labels) & is_target).sum().cpu()
        sums[2] += is_target.sum().cpu()
        for row in range(labels.shape[0]):
            if len(predicted) < keep and bool(is_target[row].any()):
                predicted.append((num_steps, guesses[row][is_target[row]].tolist()))

    for micro_batches in batches:
        runner.evaluate(micro_batches, on_output=on_output)
        num_steps += 1
    shared = [sums.tolist(), predicted]
    if dist.get_world_size(runner.group) > 1:
        dist.broadcast_object_list(shared, src=runner.last_stage_rank, group=runner.group)
    told = (replicas or Replicas()).gather(shared)
    loss, hits, targets = (sum(column) for column in zip(*(sums for sums, _ in told), strict=True))
    return EvalResult(
        loss=loss / max(targets, 1.0),
        token_accuracy=hits / max(targets, 1.0),
        num_targets=int(targets),
        predicted=_in_order([rows for _, rows in told])[:keep],
    )


def _in_order(rows_of_replicas: list[list[tuple[int, list[int]]]]) -> list[list[int]]:
    """Rows as the dataset has them: step by step, in a step replica by replica."""
    rows = [
        (step, replica, ids) for replica, rows in enumerate(rows_of_replicas) for step, ids in rows
    ]
    return [ids for _, _, ids in sorted(rows, key=lambda row: row[:2])]
