"""Evaluation inside training: the loss on held-out samples, through the same stages."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from stageline.data.batches.batch import IGNORE
from stageline.errors import DataError
from stageline.modules.chunked_loss import ChunkedLoss
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.loss_part import LossPart, Output, logits_of
from stageline.training.part_checks import check_agreement
from stageline.training.replicas import Replicas
from stageline.training.step import StepProgress

Pieces = Iterator[tuple[torch.Tensor, MicroBatch]]  # logits with their part of a micro-batch


@dataclass
class EvalResult:
    """Figures over the whole evaluation set.

    Attributes:
        loss: the mean over supervised tokens; of a loss_fn part with several terms their sum,
            each divided by its own number in the whole set.
        token_accuracy: the share of supervised tokens that greedy prediction hits, given the true
            tokens before them; None where the loss_fn part scores instead of predicting.
        num_targets: supervised tokens.
        predicted: token ids predicted at the supervised places, a list per row, of the first
            `keep` rows of the dataset; empty for a row without any. On every rank.
        figures: what the loss_fn part tells besides its loss.
        perplexity: exp of the loss, where that is the mean of token losses.
    """

    loss: float
    token_accuracy: float | None
    num_targets: int
    predicted: list[list[int]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    perplexity: float | None = None

    def named(self) -> dict[str, float]:
        """Every figure by its name in the log."""
        some = {"perplexity": self.perplexity, "token_accuracy": self.token_accuracy}
        known = {name: value for name, value in some.items() if value is not None}
        return {"loss": self.loss, **known, **self.figures}


def evaluate(
    runner: PipelineRunner,
    batches: Iterable[Sequence[MicroBatch]],
    *,
    loss_fn: Callable[..., Any],
    step: int = 0,
    keep: int = 0,
    replicas: Replicas | None = None,
    prepare: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]] = list,
) -> EvalResult:
    """Runs all batches forward only.

    Args:
        loss_fn: a loss_fn part, or a `ChunkedLoss` where the last stage gives hidden states.
        step: optimizer steps done, for a loss that depends on it.
        batches: lists of micro-batches of this replica; rows without a label weigh nothing.
            `loss_rows` [B] says which row of the dataset each one is; without it they come in
            its order.
        keep: how many rows' predicted tokens to return; of a row that comes twice, the first.
        prepare: adds to the micro-batches what the loss needs besides, on all ranks.
        replicas: they share the rows out; figures are those of all.

    Raises:
        DataError: no row has a supervised token.
    """
    replicas = replicas or Replicas()
    figures = _Figures(loss_fn, step=step, keep=keep)
    recorder = StepProgress(forward="evaluation")
    num_rows = 0  # before the rows that come next, of all replicas
    for micro_batches in batches:
        step_rows = sum(len(batch["input_ids"]) for batch in micro_batches)
        figures.next_row = num_rows + replicas.rank * step_rows
        check_agreement(micro_batches, group=runner.group)
        runner.evaluate(prepare(micro_batches), on_output=figures.add, recorder=recorder)
        num_rows += replicas.size * step_rows
    shared = [figures.hits, figures.totals, figures.sums, figures.predicted]
    if runner.schedule.num_ranks > 1:
        dist.broadcast_object_list(shared, src=runner.last_stage_rank, group=runner.group)
    told = replicas.gather(shared)
    totals = _added(totals for _, totals, _, _ in told)
    num_targets = totals.get("num_targets", 0)
    _check_some_count(num_targets, num_rows)
    means = _means(told, totals)
    by_row = {row: ids for *_, rows in told for row, ids in rows.items()}
    loss = means.pop("loss", 0.0)
    return EvalResult(
        loss=loss,
        token_accuracy=(
            sum(hits for hits, *_ in told) / max(num_targets, 1)
            if figures.part.predicts_tokens
            else None
        ),
        num_targets=num_targets,
        predicted=[by_row.get(row, []) for row in range(max(by_row, default=-1) + 1)],
        figures=means,
        perplexity=_perplexity(loss) if figures.part.is_token_sum else None,
    )


def _check_some_count(num_targets: int, num_rows: int) -> None:
    if num_targets == 0:
        raise DataError(
            f"none of the {num_rows} held-out rows has a supervised token. One at least was "
            "expected, because a loss over nothing would be 0, and the best: look at `prompt` and "
            "`max_token_num`, or leave evaluations out (`eval_samples` 0)."
        )


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _means(told: Sequence[Any], totals: Mapping[str, int]) -> dict[str, float]:
    """Loss and figures over the whole set: each sum by the count that divides it."""
    names = dict.fromkeys(name for _, _, sums, _ in told for name in sums)
    return {
        name: sum(
            sum(sums.get(name, {}).get(count, 0.0) for _, _, sums, _ in told) / max(total, 1)
            for count, total in totals.items()
        )
        for name in names
    }


def _added(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    added: dict[str, int] = {}
    for counter in counters:
        for name, value in counter.items():
            added[name] = added.get(name, 0) + value
    return added


class _Figures:
    """Adds up what the last stage gives.

    Attributes:
        hits: supervised tokens that are predicted right.
        totals: count -> number.
        sums: figure -> count -> sum that is to be divided by it.
        predicted: row of the dataset -> predicted tokens, of the first `keep` rows.
        next_row: the row that comes next, where the micro-batch does not say it.
    """

    def __init__(self, loss_fn: Callable[..., Any], *, step: int, keep: int) -> None:
        self.part = LossPart.of(loss_fn)
        self.pieces: Callable[[torch.Tensor, MicroBatch], Pieces] = _one_piece
        if isinstance(self.part.loss_fn, ChunkedLoss):
            self.pieces = self.part.loss_fn.pieces
            self.part = self.part.over(self.part.loss_fn.loss_fn)
        self.step = step
        self.keep = keep
        self.hits = 0
        self.totals = dict.fromkeys(self.part.counts, 0)
        self.sums: dict[str, dict[str, float]] = {}
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
            self._add(self.part.sums(logits, piece, step=self.step))
            found.append(logits[:, :-1].argmax(dim=-1))
        self.totals = _added([self.totals, self.part.count([batch])])
        if not self.part.predicts_tokens:
            return
        guesses = torch.cat(found, dim=1)
        self.hits += int(((guesses == labels) & is_target).sum())
        for index, row in enumerate(batch.get("loss_rows", in_order).tolist()):
            if row < self.keep and bool(is_target[index].any()):
                self.predicted.setdefault(row, guesses[index][is_target[index]].tolist())

    def _add(self, sums: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, by_count in sums.items():
            mine = self.sums.setdefault(name, dict.fromkeys(by_count, 0.0))
            for count, value in by_count.items():
                mine[count] += value.item()


def _one_piece(logits: torch.Tensor, batch: MicroBatch) -> Pieces:
    yield logits, batch
