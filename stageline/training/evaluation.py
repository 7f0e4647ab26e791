"""Evaluation inside training, through the same stages; the best checkpoint; early stopping."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stageline.checkpoint.layout import draft_name, fsync_path, read_manifest
from stageline.checkpoint.writer import remove_checkpoint
from stageline.contracts import IGNORE
from stageline.distributed.ranks import Ranks
from stageline.errors import DataError, UserError, spelled
from stageline.modules.chunked_loss import ChunkedLoss, LossByToken
from stageline.modules.losses import likeliest
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.loss_part import LossPart, Output, logits_of
from stageline.training.replicas import Replicas
from stageline.training.step import StepProgress, check_agreement


@dataclass
class EvalResult:
    """Figures over the whole evaluation set.

    Attributes:
        loss: the mean over supervised tokens; of several terms the sum, each divided by its own
            count in the whole set. None for rewarded answers.
        token_accuracy: share of supervised tokens that greedy prediction hits, given the true
            tokens before them; None for a loss_fn part over scores.
        predicted: token ids predicted at the supervised places of each of the first `keep` rows.
        figures: named figures of the loss_fn part besides its loss, and of the completions.
        completions: answers of the stages to the first rows.
        perplexity: exp of the loss, where that is the mean cross-entropy of tokens.
    """

    loss: float | None
    token_accuracy: float | None
    num_targets: int  # supervised tokens
    predicted: list[list[int]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    completions: list[str] = field(default_factory=list)
    perplexity: float | None = None

    def named(self) -> dict[str, float]:
        """Return every figure by its name in the log."""
        names = ("loss", "perplexity", "token_accuracy")
        known = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**known, **self.figures}


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
    """Run all batches forward only.

    Args:
        batches: lists of micro-batches of this replica; rows without a label weigh nothing.
            `loss_rows` [B] has the row of the dataset; without it they come in its order.
        loss_fn: a loss_fn part, or a `ChunkedLoss` or `LossByToken` around one where the last
            stage gives hidden states.
        keep: rows whose predicted tokens are returned; of a row that comes twice, the first.
        prepare: adds to the micro-batches what the loss needs besides, on all ranks.

    Raises:
        DataError: no row has a supervised token.
    """
    replicas, part = replicas or Replicas(), LossPart.of(loss_fn)
    chunked = part.loss_fn if isinstance(part.loss_fn, ChunkedLoss | LossByToken) else None
    if chunked is not None:
        part = part.over(chunked.loss_fn)
    hits, counts = 0, Counter(dict.fromkeys(part.counts, 0))
    sums: dict[tuple[str, str], float] = defaultdict(float)  # (figure, count that divides it)
    predicted: dict[int, list[int]] = {}  # by row of the dataset
    next_row = num_rows = 0  # next row of this replica, if rows have no number; rows of all

    def add(output: Output, batch: MicroBatch) -> None:
        nonlocal hits, next_row
        labels = batch["labels"][:, 1:]
        in_order = torch.arange(next_row, next_row + len(labels))
        next_row += len(labels)
        is_target = labels != IGNORE
        if not bool(is_target.any()):
            return
        found, logits = [], logits_of(output)
        pieces: Iterable[tuple[Any, MicroBatch]] = [(logits, batch)]
        if isinstance(chunked, LossByToken):
            pieces = [(chunked.logits_of(logits), batch)]
        elif chunked is not None:
            pieces = chunked.pieces(logits, batch)
        for logits, piece in pieces:
            for name, by_count in part.sums(logits, piece, step=step).items():
                for count, value in by_count.items():
                    sums[name, count] += value.item()
            found.append(likeliest(logits, piece)[:, :-1])
        counts.update(part.count([batch]))
        if part.predicts_tokens:
            guesses = torch.cat(found, dim=1)
            hits += int(((guesses == labels) & is_target).sum())
            for index, row in enumerate(batch.get("loss_rows", in_order).tolist()):
                if row < keep and bool(is_target[index].any()):
                    predicted.setdefault(row, guesses[index][is_target[index]].tolist())

    recorder = StepProgress(device=runner.device, forward="evaluation")
    for micro_batches in batches:
        step_rows = sum(len(batch["input_ids"]) for batch in micro_batches)
        next_row = num_rows + replicas.rank * step_rows
        check_agreement(micro_batches, group=runner.group)
        runner.evaluate(prepare(micro_batches), on_output=add, recorder=recorder)
        num_rows += replicas.size * step_rows
    shared = [hits, counts, sums, predicted]
    if runner.schedule.num_ranks > 1:
        dist.broadcast_object_list(shared, src=runner.last_stage_rank, group=runner.group)
    told = replicas.gather(shared)
    totals = {name: sum(own[name] for _, own, *_ in told) for name in part.counts}
    num_targets = totals["num_targets"]
    if num_targets == 0:
        raise DataError(
            f"none of the {num_rows} held-out rows has a supervised token. Look at `prompt` and "
            "`max_token_num`, or set `eval_samples` 0."
        )
    # each sum by the count that divides it
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for _, _, own_sums, _ in told for name, _ in own_sums):
        for count, total in totals.items():
            part_sum = sum(own_sums.get((name, count), 0.0) for _, _, own_sums, _ in told)
            means[name] = means.get(name, 0) + part_sum / max(total, 1)
    by_row = {row: ids for *_, rows in told for row, ids in rows.items()}
    loss, perplexity = means.pop("loss", 0.0), None
    if part.is_cross_entropy:
        perplexity = math.inf if loss > 700 else math.exp(loss)  # float64 ends there
    accuracy = sum(own_hits for own_hits, *_ in told) / num_targets
    return EvalResult(
        loss=loss,
        token_accuracy=accuracy if part.predicts_tokens else None,
        num_targets=num_targets,
        predicted=[by_row.get(row, []) for row in range(max(by_row, default=-1) + 1)],
        figures=means,
        perplexity=perplexity,
    )


FALLING = ("loss", "perplexity")  # figures with such a word are better when lower


def figure_of(result: EvalResult, name: str) -> float:
    """Return a held-out figure by its name in the log."""
    figures = result.named()
    if name not in figures:
        raise UserError(
            f"an evaluation of this run has no figure {name!r}. Name one of {', '.join(figures)} "
            "with `save_best` or `early_stop.metric`."
        )
    return figures[name]


def is_better(value: float, best: float | None, *, metric: str, by: float = 0.0) -> bool:
    """Whether a figure beats the best so far by more than `by`; what is not a number never does."""
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    lower = any(word in metric for word in FALLING)
    return value < best - by if lower else value > best + by


LINK = "best"


class BestCheckpoint:
    """Keeps the weights of the best evaluation so far; every rank calls it with the same results.

    `best` is a link to the folder `best-step-00000123` next to it: a link is exchanged in one step,
    so it leads to a complete checkpoint whenever a run is killed. A resumed run continues from its
    own best; a new run in an old folder moves only the link.

    Args:
        folder: of the run's checkpoints.
        metric: name of the held-out figure that is compared; "none" keeps nothing.
        save: saves the weights as a new folder, `save(path, step=..., facts=...)`, on all ranks.
        start_step: steps done before; 0 for a new run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metric: str,
        save: Callable[..., object],
        group: dist.ProcessGroup | None = None,
        start_step: int = 0,
    ) -> None:
        self.folder, self.metric, self.save = folder, metric, save
        self.link, self.ranks = folder / LINK, Ranks.of(group)
        self.value: float | None = None
        self.step: int | None = None
        self._kept: str | None = None  # name of the folder that this run may remove
        if metric != "none":
            found = self.ranks.on_first(lambda: self._read(is_continued=start_step > 0))
            if found is not None:
                self.value, self.step, self._kept = found

    def improves(self, result: EvalResult) -> bool:
        """Whether it is better than all before."""
        if self.metric == "none" or result.num_targets == 0:
            return False
        return is_better(figure_of(result, self.metric), self.value, metric=self.metric)

    def keep(self, step: int, result: EvalResult) -> str:
        """Save the weights as the new best, then remove the old ones; return a line about it."""
        name = f"{LINK}-step-{step:08d}"
        # a run that was killed, or an earlier run, may have left a folder of this step
        names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
        free = next(name for name in names if not (self.folder / name).exists())
        name = self.ranks.gather(free)[0]
        figures = {**result.named(), "num_targets": result.num_targets}
        facts = {"best": {"metric": self.metric, "step": step, "figures": figures}}
        self.save(self.folder / name, step=step, facts=facts)
        self.ranks.on_first(lambda: self._exchange(name))
        self.value, self.step, self._kept = figure_of(result, self.metric), step, name
        return f"best {self.metric} so far, {self.value:.4f} at step {step}: saved {self.link}"

    def _read(self, *, is_continued: bool) -> tuple[float, int, str] | None:
        if self.link.exists() and not self.link.is_symlink():
            raise UserError(
                f"{self.link} is not a link, as `save_best` makes. Rename that folder or choose "
                "another `output_dir`."
            )
        if not is_continued or not self.link.exists():
            return None
        # another program's has none; all figures are there: the metric may be another one now
        facts = read_manifest(self.link).get("best") or {"figures": {}}
        value = facts["figures"].get(self.metric)
        return None if value is None else (value, facts["step"], os.readlink(self.link))

    def _exchange(self, name: str) -> None:
        temporary = self.folder / draft_name(self.link)
        os.symlink(name, temporary, target_is_directory=True)
        os.replace(temporary, self.link)
        fsync_path(self.folder)  # before the old one goes
        if self._kept not in (None, name):
            remove_checkpoint(self.folder / str(self._kept))


@dataclass
class EarlyStop:
    """A count of evaluations without improvement; the same on all ranks, as the figures are.

    `patience` of them in a row end the run (0 = off); an improvement is more than `delta`.
    """

    patience: int
    metric: str = "loss"
    delta: float = 0.0
    best: float | None = field(default=None, init=False)
    best_step: int = field(default=0, init=False)
    count: int = field(default=0, init=False)

    @property
    def is_over(self) -> bool:
        return 0 < self.patience <= self.count

    def see(self, step: int, value: float) -> None:
        is_improved = is_better(value, self.best, metric=self.metric, by=self.delta)
        self.count = 0 if is_improved else self.count + 1
        if is_improved:
            self.best, self.best_step = value, step

    def see_log(self, records: Iterable[Mapping[str, Any]], *, until: int) -> None:
        """Take the evaluations up to step `until` from the log of a run that is continued."""
        by_step = {one["step"]: one.get(self.metric) for one in records if one["kind"] == "eval"}
        for step, value in sorted(by_step.items()):
            if step <= until:
                self.see(step, math.nan if value is None else float(value))

    def __str__(self) -> str:
        best = "none" if self.best is None else f"{self.best:.4f} at step {self.best_step}"
        return spelled(
            f"{self.count} evaluations without a better {self.metric} (best: {best}): the run ends "
            "here (`early_stop.patience`)"
        )
