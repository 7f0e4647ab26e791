"""Evaluation inside training: the loss on held-out samples, through the same stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stageline.modules.chunked_loss import ChunkedLoss
from stageline.pipeline.runner import MicroBatch, PipelineRunner

IGNORE = -100
Pieces = Iterator[tuple[torch.Tensor, MicroBatch]]  # logits with their part of a micro-batch


@dataclass
class EvalResult:
    """Figures over the whole evaluation set.

    Attributes:
        loss: the mean over supervised tokens.
        token_accuracy: the share of supervised tokens that greedy prediction hits, given the true
            tokens before them.
        num_targets: supervised tokens.
        predicted: token ids predicted at the supervised places, a list per row, of the first
            `keep` rows; on every rank.
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
) -> EvalResult:
    """Runs all batches forward only.

    Args:
        loss_fn: a loss_fn part, or a `ChunkedLoss` where the last stage gives hidden states.
        batches: lists of micro-batches; rows without a label weigh nothing.
        keep: how many rows' predicted tokens to return.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # loss, hits, targets
    predicted: list[list[int]] = []
    one = torch.ones((), device=runner.device)

    part, pieces = loss_fn, _one_piece
    if isinstance(loss_fn, ChunkedLoss):
        part, pieces = loss_fn.loss_fn, loss_fn.pieces

    def on_output(output: torch.Tensor, batch: MicroBatch) -> None:
        labels = batch["labels"][:, 1:]
        is_target = labels != IGNORE
        if not bool(is_target.any()):
            return
        found = []
        for logits, piece in pieces(output, batch):
            sums[0] += part(logits, piece, num_targets=one).double().cpu()
            found.append(logits[:, :-1].argmax(dim=-1))
        guesses = torch.cat(found, dim=1)
        sums[1] += ((guesses == labels) & is_target).sum().cpu()
        sums[2] += is_target.sum().cpu()
        for row in range(labels.shape[0]):
            if len(predicted) < keep and bool(is_target[row].any()):
                predicted.append(guesses[row][is_target[row]].tolist())

    for micro_batches in batches:
        runner.evaluate(micro_batches, on_output=on_output)
    shared = [sums.tolist(), predicted]
    if runner.model.num_stages > 1:
        dist.broadcast_object_list(shared, src=runner.last_stage_rank, group=runner.group)
    (loss, hits, targets), predicted = shared
    return EvalResult(
        loss=loss / max(targets, 1.0),
        token_accuracy=hits / max(targets, 1.0),
        num_targets=int(targets),
        predicted=predicted,
    )


def _one_piece(logits: torch.Tensor, batch: MicroBatch) -> Pieces:
    yield logits, batch
