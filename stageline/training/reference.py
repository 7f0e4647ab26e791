"""What a loss over preferences has to know of the start model, added to each step's micro-batches.

Before a step's schedule the same stages run forward once more, without gradients and dropout: with
adapters off, or, where more than adapters is trained, not at all, because the log-probabilities
were computed before the first step. There is never a second copy of the weights.

The rank of the last stage adds `loss_reference` [rows] to each micro-batch and, where the loss asks
for it, `loss_kl`: the mean log-ratio of model and reference over prompts with the answers of other
rows (`loss_kl_*` of the micro-batches), of the whole step and all replicas, and at least 0.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from stageline import progress
from stageline.errors import UserError
from stageline.modules.adapters_off import adapters_off, begun_adapters, trained_besides
from stageline.modules.preference_loss import KL, REFERENCE, row_lengths, row_log_probs
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.loss_part import declares
from stageline.training.replicas import Replicas
from stageline.training.step_loss import Output, logits_of
from stageline.training.step_progress import StepProgress

Mode = Literal["auto", "adapters_off", "precompute", "columns"]
# rows [B] of each micro-batch, then of each one with the answers of other rows
Source = Callable[[Sequence[MicroBatch], Sequence[MicroBatch]], list[torch.Tensor]]
KL_PREFIX = "loss_kl_"


class Reference:
    """Prepares micro-batches; every rank of a pipeline calls it with the same ones.

    Args:
        needs_reference, needs_kl: what the loss asks for.
        source: gives the log-probabilities under the reference, where the last stage is.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        needs_reference: bool,
        needs_kl: bool,
        source: Source | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.runner = runner
        self.needs_reference = needs_reference
        self.needs_kl = needs_kl
        self.source = source or WithAdaptersOff(runner)
        self.replicas = replicas or Replicas()

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what the loss needs, on the rank of the last stage."""
        batches = list(batches)
        if not self.needs_reference:
            return batches
        mixed = [mixed_batch(batch) for batch in batches] if self.needs_kl else []
        with progress.doing("reference"):
            found = self.source(batches, mixed)
            kl = self._kl(batches, mixed, found[len(batches) :]) if self.needs_kl else None
        if not holds_last_stage(self.runner):
            return batches
        added = {} if kl is None else {KL: kl}
        pairs = zip(batches, found[: len(batches)], strict=True)
        return [{**batch, REFERENCE: reference, **added} for batch, reference in pairs]

    def _kl(
        self,
        batches: Sequence[MicroBatch],
        mixed: Sequence[MicroBatch],
        references: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        policies = log_probs_of(self.runner, mixed)
        sums = [torch.zeros((), dtype=torch.float64, device=self.runner.device)]
        # what only fills up an evaluation has lost its labels, in the rows proper alone
        is_there = [row_lengths(batch["labels"]) > 0 for batch in batches]
        for policy, reference, kept in zip(policies, references, is_there, strict=False):
            ratios = policy - reference.to(policy)
            sums.append(torch.where(kept.to(policy.device), ratios, 0).double().sum())
        own = [torch.stack(sums).sum().item(), float(sum(int(kept.sum()) for kept in is_there))]
        total, count = self.replicas.sum(own)
        return torch.tensor(max(total / max(count, 1), 0.0), dtype=torch.float64)


def make_reference(
    runner: PipelineRunner,
    *,
    loss_fn: Callable[..., object],
    source: Source | None = None,
    replicas: Replicas | None = None,
) -> Reference:
    """The reference that a loss_fn part asks for: none, for most."""
    return Reference(
        runner,
        needs_reference=declares(loss_fn, "needs_reference"),
        needs_kl=declares(loss_fn, "needs_kl"),
        source=source,
        replicas=replicas,
    )


def holds_last_stage(runner: PipelineRunner) -> bool:
    """Whether this rank holds the last stage, where the losses are."""
    return runner.schedule.last_stage_rank == runner.pp_rank


def mixed_batch(batch: MicroBatch) -> MicroBatch:
    """The prompts of a micro-batch with answers of other rows.

    Raises:
        UserError: the collate part made none.
    """
    if KL_PREFIX + "input_ids" not in batch:
        raise UserError(
            "the loss estimates its baseline from prompts with the answers of other rows, and a "
            "micro-batch has none. They were expected as loss_kl_input_ids and so on: use "
            "--collate-fn kto, or a loss without that term (--loss-fn.use_kl false)."
        )
    # pixels and what else belongs to the images of the prompts is the same
    own = {n: v for n, v in batch.items() if n != "labels" and not n.startswith("loss_")}
    others = {n.removeprefix(KL_PREFIX): v for n, v in batch.items() if n.startswith(KL_PREFIX)}
    return {**own, **others}


def log_probs_of(runner: PipelineRunner, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """The log-probability [B] of each row's answer, forward only, dropout off.

    Every rank of the pipeline calls this; it is empty where the last stage is not.
    """
    found: list[torch.Tensor] = []

    def take(output: Output, batch: MicroBatch) -> None:
        found.append(row_log_probs(logits_of(output), batch["labels"]))

    if batches:
        runner.evaluate(batches, on_output=take, recorder=StepProgress(forward="reference"))
    return found


class WithAdaptersOff:
    """The source of a run that trains adapters alone: the same stages without them."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner

    def __call__(
        self, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        with adapters_off(self.runner.local):
            return log_probs_of(self.runner, [*batches, *mixed])


class AsTheyAre:
    """The source of the start itself: nothing is trained yet."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner

    def __call__(
        self, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        return log_probs_of(self.runner, [*batches, *mixed])


class FromColumns:
    """The source of a dataset whose rows bring the log-probabilities."""

    def __init__(self, runner: PipelineRunner) -> None:
        self.runner = runner

    def __call__(
        self, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        missing = next((n for n, batch in enumerate(batches) if REFERENCE not in batch), None)
        if missing is not None or mixed:
            what = "answers of other rows" if mixed else f"micro-batch {missing}"
            raise UserError(
                f"--reference columns: the rows bring no log-probabilities for {what}. "
                "ref_chosen_logps and ref_rejected_logps (dpo), or ref_logps (kto without its KL "
                "term), were expected in every row, of training and held-out data: add them, or "
                "use --reference auto."
            )
        if not holds_last_stage(self.runner):
            return []
        return [batch[REFERENCE] for batch in batches]


def choose_mode(
    mode: Mode, runner: PipelineRunner, *, has_columns: bool, is_resumed: bool
) -> tuple[Mode, str]:
    """How the reference of a run is come by, the same on all ranks, and why.

    Every rank calls this once, before the first step of this process.

    Args:
        has_columns: the rows bring their log-probabilities.
        is_resumed: adapters have been trained by this run.

    Raises:
        UserError: adapters off would not be the model that training began with.
    """
    if mode == "auto" and has_columns:
        return "columns", "the rows bring them"
    if mode not in ("auto", "adapters_off"):
        return mode, "as asked for"
    reason = _why_not_off(runner, is_resumed=is_resumed)
    if reason is None:
        return "adapters_off", "adapters alone are trained"
    if mode == "auto":
        return "precompute", reason
    raise UserError(
        f"--reference adapters_off: {reason}, so the model without adapters is not the one that "
        "training began with. Adapters that start at zero and nothing else were expected to be "
        "trained: freeze the rest (--frozen-lm-head, --frozen-llm ...), or use --reference "
        "precompute."
    )


def _why_not_off(runner: PipelineRunner, *, is_resumed: bool) -> str | None:
    besides = [name for model in runner.local for name in trained_besides(model)]
    begun = [] if is_resumed else [name for m in runner.local for name in begun_adapters(m)]
    gathered: list[tuple[list[str], list[str]]] = [([], [])] * runner.schedule.num_ranks
    dist.all_gather_object(gathered, (besides, begun), group=runner.group)
    others = [name for names, _ in gathered for name in names]
    not_zero = [name for _, names in gathered for name in names]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"{others[0]}{more} {'are' if more else 'is'} trained besides adapters"
    return f"{not_zero[0]} does not start at zero" if not_zero else None
