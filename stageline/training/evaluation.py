"""Evaluation inside training: the loss on held-out samples, through the same stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from stageline.data.batch import IGNORE
from stageline.modules.chunked_loss import ChunkedLoss
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.agreement import check_agreement
from stageline.training.replicas import Replicas
from stageline.training.step_loss import Output, logits_of
from stageline.training.step_progress import StepProgress

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
            `keep` rows of the dataset; empty for a row without any. On every rank.
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
        loss_fn: a loss_fn part, or a `ChunkedLoss` where the last stage gives hidden states.
        batches: lists of micro-batches of this replica; rows without a label weigh nothing.
            `loss_rows` [B] says which row of the dataset each one is; without it they come in
            its order.
        keep: how many rows' predicted tokens to return.
        replicas: they share the rows out; figures are those of all.
    """
    replicas = replicas or Replicas()
    figures = _Figures(loss_fn, keep=keep, device=runner.device)
    recorder = StepProgress(forward="evaluation")
    num_rows = 0  # before the rows that come next, of all replicas
    for micro_batches in batches:
        step_rows = sum(len(batch["input_ids"]) for batch in micro_batches)
        figures.next_row = num_rows + replicas.rank * step_rows
        check_agreement(micro_batches, group=runner.group)
        runner.evaluate(micro_batches, on_output=figures.add, recorder=recorder)
        num_rows += replicas.size * step_rows
    shared = [figures.sums.tolist(), figures.predicted]
    if runner.schedule.num_ranks > 1:
        dist.broadcast_object_list(shared, src=runner.last_stage_rank, group=runner.group)
    told = replicas.gather(shared)
    loss, hits, targets = (sum(column) for column in zip(*(sums for sums, _ in told), strict=True))
    by_row = {row: ids for _, rows in told for row, ids in rows.items()}
    return EvalResult(
        loss=loss / max(targets, 1.0),
        token_accuracy=hits / max(targets, 1.0),
        num_targets=int(targets),
        predicted=[by_row.get(row, []) for row in range(max(by_row, default=-1) + 1)],
    )


class _Figures:
    """Adds up what the last stage gives.

    Attributes:
        sums: loss, hits, targets.
        predicted: row of the dataset -> predicted tokens, of the first `keep` rows.
        next_row: the row that comes next, where the micro-batch does not say it.
    """

    def __init__(
        self, loss_fn: Callable[..., torch.Tensor], *, keep: int, device: torch.device
    ) -> None:
        self.part, self.pieces = loss_fn, _one_piece
        if isinstance(loss_fn, ChunkedLoss):
            self.part, self.pieces = loss_fn.loss_fn, loss_fn.pieces
        self.keep = keep
        self.one = torch.ones((), device=device)
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.predicted: dict[int, list[int]] = {}
        self.next_row = 0

    def add(self, output: Output, batch: MicroBatch) -> None:
        """The output of one micro-batch."""
        labels = batch["labels"][:, 1:]
        in_order = torch.arange(self.next_row, self.next_row + len(labels))
        self.next_row += len(labels)
        is_target = labels != IGNORE
        if not bool(is_target.any()):
            return
        found = []
        for logits, piece in self.pieces(logits_of(output), batch):
            self.sums[0] += self.part(logits, piece, num_targets=self.one).double().cpu()
            found.append(logits[:, :-1].argmax(dim=-1))
        guesses = torch.cat(found, dim=1)
        self.sums[1] += ((guesses == labels) & is_target).sum().cpu()
        self.sums[2] += is_target.sum().cpu()
        for index, row in enumerate(batch.get("loss_rows", in_order).tolist()):
            if row < self.keep and bool(is_target[index].any()):
                self.predicted[row] = guesses[index][is_target[index]].tolist()


def _one_piece(logits: torch.Tensor, batch: MicroBatch) -> Pieces:
    yield logits, batch
