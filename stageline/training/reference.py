"""Add the log-probabilities of the reference model to the micro-batches of a preference loss.

The reference is the start model: the same stages with adapters off or, where more than adapters is
trained, a table that was computed before the first step. A loss over sampled answers, which are not
known then, compares with a copy of the start weights on the host (`FrozenCopy`).

The rank of the last stage adds `loss_reference` [rows] to each micro-batch and, where the loss asks
for it, `loss_kl`: the mean log-ratio of model and reference over prompts with the answers of other
rows, of the whole step and all replicas, and at least 0.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from stageline import progress
from stageline.data.batches.batch import READ_OFF_IDS
from stageline.device import is_accelerator
from stageline.distributed.terminal import terminal
from stageline.errors import UserError
from stageline.modules.lora import adapters_off, begun_adapters, trained_besides
from stageline.modules.losses import KL, PAIRS, REFERENCE, row_lengths, row_log_probs
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.stage import Stage
from stageline.training.loss_part import LossPart, Output, logits_of
from stageline.training.replicas import Replicas
from stageline.training.step import StepProgress, check_agreement

Mode = Literal["auto", "adapters_off", "precompute", "columns", "frozen_copy"]
# rows [B] of each micro-batch, then of each one with the answers of other rows
Source = Callable[[Sequence[MicroBatch], Sequence[MicroBatch]], list[torch.Tensor]]
KL_PREFIX = "loss_kl_"


class Reference:
    """Prepares micro-batches; every rank of a pipeline calls it with the same ones.

    Args:
        loss: declares what it needs; mostly nothing.
        source: gives the log-probabilities under the reference on the last stage; None: the same
            stages with adapters off.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        loss: LossPart,
        source: Source | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.runner, self.source, self.replicas = runner, source, replicas or Replicas()
        self.needs_reference, self.needs_kl = loss.needs_reference, loss.needs_kl

    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with what the loss needs, on the rank of the last stage."""
        if not self.needs_reference:
            return list(batches)
        mixed = [mixed_batch(batch) for batch in batches] if self.needs_kl else []
        with progress.doing("reference"):
            if self.source is not None:
                found = self.source(batches, mixed)
            else:  # adapters are the only thing that is trained
                with adapters_off(self.runner.local):
                    found = log_probs_of(self.runner, [*batches, *mixed])
            policies = log_probs_of(self.runner, mixed)
        added: dict[str, torch.Tensor] = {}
        if self.needs_kl:  # its mean is over the whole step
            sums = [torch.zeros((), dtype=torch.float64, device=self.runner.device)]
            # rows that only fill up an evaluation have lost their labels, but only in `batches`
            is_there = [row_lengths(batch["labels"]) > 0 for batch in batches]
            references = found[len(batches) :]
            for policy, reference, kept in zip(policies, references, is_there, strict=False):
                ratios = policy - reference.to(policy)
                sums.append(torch.where(kept.to(policy.device), ratios, 0).double().sum())
            own = [torch.stack(sums).sum().item(), float(sum(int(kept.sum()) for kept in is_there))]
            total, count = self.replicas.sum(own)
            added[KL] = torch.tensor(max(total / max(count, 1), 0.0), dtype=torch.float64)
        if not holds_last_stage(self.runner):
            return list(batches)
        pairs = zip(batches, found[: len(batches)], strict=True)
        return [{**batch, REFERENCE: reference, **added} for batch, reference in pairs]


def holds_last_stage(runner: PipelineRunner) -> bool:
    """Whether this rank holds the last stage, where the losses are."""
    return runner.schedule.last_stage_rank == runner.pp_rank


def mixed_batch(batch: MicroBatch) -> MicroBatch:
    """Return the prompts of a micro-batch with answers of other rows."""
    if KL_PREFIX + "input_ids" not in batch:
        raise UserError(
            "a micro-batch has no loss_kl_input_ids: the loss compares with the answers of other "
            "rows. Use `collate_fn` kto, or `loss_fn.use_kl` false."
        )
    # pixels and what else belongs to the images of the prompts is the same
    dropped = ("labels", *READ_OFF_IDS)
    own = {n: v for n, v in batch.items() if n not in dropped and not n.startswith("loss_")}
    others = {n.removeprefix(KL_PREFIX): v for n, v in batch.items() if n.startswith(KL_PREFIX)}
    return {**own, **others}


def log_probs_of(runner: PipelineRunner, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Return the log-probability [B] of each row's answer, forward only, dropout off.

    Every rank of the pipeline calls this; it is empty where the last stage is not.
    """
    found: list[torch.Tensor] = []

    def take(output: Output, batch: MicroBatch) -> None:
        found.append(row_log_probs(logits_of(output), batch["labels"]))

    if batches:
        told = StepProgress(device=runner.device, forward="reference")
        runner.evaluate(batches, on_output=take, recorder=told)
    return found


def from_columns(
    runner: PipelineRunner, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """Take them from the rows of the dataset."""
    missing = next((n for n, batch in enumerate(batches) if REFERENCE not in batch), None)
    if missing is not None or mixed:
        what = "answers of other rows" if mixed else f"micro-batch {missing}"
        raise UserError(
            f"`reference` columns: the rows bring no log-probabilities for {what}. Add "
            "ref_chosen_logps and ref_rejected_logps (dpo) or ref_logps (kto without its KL term) "
            "to every row, or use `reference` auto."
        )
    return [batch[REFERENCE] for batch in batches] if holds_last_stage(runner) else []


def choose_mode(
    mode: Mode,
    runner: PipelineRunner,
    *,
    has_columns: bool,
    begun_as: Mode | None,
    otherwise: Mode = "precompute",
) -> tuple[Mode, str]:
    """Return where the reference of a run comes from, and why; all ranks call this before step 1.

    Args:
        has_columns: the rows have their log-probabilities.
        begun_as: the mode when the run began, whose adapters a resumed run cannot see at zero.
        otherwise: what auto means where the model without adapters is not the start model.

    Raises:
        UserError: adapters_off was asked for, and would not be the start model.
    """
    if mode == "auto" and begun_as is not None:
        return begun_as, "as the run began"
    if mode == "auto" and has_columns:
        return "columns", "the rows bring them"
    if mode not in ("auto", "adapters_off"):
        return mode, "as asked for"
    reasons = [f"{n} is trained besides adapters" for m in runner.local for n in trained_besides(m)]
    if begun_as is None:
        reasons += [f"{n} does not start at zero" for m in runner.local for n in begun_adapters(m)]
    gathered: list[list[str]] = [[] for _ in range(runner.schedule.num_ranks)]
    dist.all_gather_object(gathered, reasons, group=runner.group)
    reason = next((one for found in gathered for one in found), None)
    if reason is None:
        return "adapters_off", "adapters alone are trained"
    if mode == "auto":
        return otherwise, reason
    raise UserError(
        f"`reference` adapters_off: {reason}. Freeze the rest (`frozen_lm_head`, `frozen_llm` "
        f"...), or use `reference` {otherwise}."
    )


# -- a table of log-probabilities under the start model, for runs that train more than adapters.
# N samples of the dataset, K rows of each: chosen and rejected; or its own, and its prompt with the
# answer of another row.

NOTE_EVERY = 100  # batches


@dataclass(frozen=True)
class FromTable:
    """The source of a run whose reference was computed before it began: [N, K], or None."""

    values: torch.Tensor | None

    def __call__(
        self, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        if self.values is None:
            return []
        num_own = self.values.shape[1] - (1 if mixed else 0)
        found = []
        for columns, count in ((slice(num_own), None), (slice(num_own, None), len(mixed))):
            for batch in batches[:count]:
                rows = batch["loss_rows"][:: rows_of_sample(batch)]
                values = self.values[rows.clamp(min=0), columns]
                # a row of -1 only fills the micro-batch up
                found.append(torch.where((rows >= 0)[:, None], values, 0).flatten())
        return found


def rows_of_sample(batch: MicroBatch) -> int:
    """Return the rows of a micro-batch that one sample became."""
    return 2 if PAIRS in batch else 1


def reference_table(
    runner: PipelineRunner,
    batches: Iterable[Sequence[MicroBatch]],
    *,
    path: Path,
    key: str,
    num_samples: int,
    needs_kl: bool,
    is_start: bool,
    replicas: Replicas | None = None,
) -> FromTable:
    """Read the table of one dataset from its file, or compute it; every rank calls this.

    Args:
        batches: an evaluation of the dataset: each row once, with `loss_rows`.
        key: identifies data, template and weights; a file with another key is not read.
        is_start: nothing has been trained, so the table can be computed.

    Raises:
        UserError: there is no table and no start model any more, or the start model gives NaN.
    """
    replicas, is_last = replicas or Replicas(), holds_last_stage(runner)
    values = _read(path, key) if is_last else None
    values = values if values is not None and len(values) == num_samples else None
    # replicas share the file system or not: what one of them has, all have
    values = next((one for one in replicas.gather(values) if one is not None), None)
    is_known = [values is not None]
    dist.broadcast_object_list(is_known, src=runner.last_stage_rank, group=runner.group)
    if is_known[0]:
        return FromTable(values)
    if not is_start:
        raise UserError(
            f"{path} is not there, or belongs to other data or another start model. Put the "
            "reference folder back, or start again in a new `output_dir`."
        )
    terminal.say(f"computing log-probabilities of {num_samples} rows under the start model")
    for number, micro_batches in enumerate(batches, start=1):
        if number % NOTE_EVERY == 0:
            terminal.say(f"reference: {number} batches")
        check_agreement(micro_batches, group=runner.group)
        mixed = [mixed_batch(batch) for batch in micro_batches] if needs_kl else []
        found = log_probs_of(runner, [*micro_batches, *mixed])
        for index, batch in enumerate(micro_batches if is_last else ()):
            times = rows_of_sample(batch)
            made = found[index].view(-1, times)
            if mixed:
                made = torch.cat([made, found[len(micro_batches) + index][:, None]], dim=1)
            if values is None:
                values = torch.full((num_samples, made.shape[1]), torch.nan, dtype=made.dtype)
            samples = batch["loss_rows"][::times]
            values[samples[samples >= 0]] = made.cpu()[samples >= 0]
    for other in replicas.gather(values) if is_last else ():
        values = other if values is None else torch.where(torch.isnan(values), other, values)
    if values is not None:
        bad = torch.isnan(values).any(dim=1).nonzero().flatten().tolist()
        if bad:
            raise UserError(
                f"the start model gives no log-probability for row {bad[0]} ({len(bad)} rows in "
                "all). Look at the row and at the model, or use `bf16` instead of `fp16`."
            )
        _write(path, values, key)
    return FromTable(values)


def _read(path: Path, key: str) -> torch.Tensor | None:
    """Return the table; None where there is no such file, or one of another key."""
    try:
        with safe_open(path, framework="pt") as file:
            is_ours = (file.metadata() or {}).get("key") == key
            return file.get_tensor("log_probs") if is_ours else None
    except (OSError, SafetensorError):
        return None


def _write(path: Path, values: torch.Tensor, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({"log_probs": values.contiguous()}, draft, metadata={"key": key})
    draft.replace(path)  # at once: a file of this name is complete


StartStage = Callable[[int], Stage]  # index of a stage -> the stage as the run began with it


class FrozenCopy:
    """The start weights of what a run trains, kept on the host, for passes of the start model.

    All ranks of a pipeline make it together, with whole (not sharded) weights. While it is in place
    the weights of the run are where it was: a device holds one tensor more, never a second model.

    Args:
        start_stage: builds a stage of the start model; None: the run begins with its own weights.
    """

    def __init__(self, runner: PipelineRunner, *, start_stage: StartStage | None = None) -> None:
        self.runner = runner
        self._kept: dict[str, torch.Tensor] = {}
        for model in runner.local:
            start = model if start_stage is None else start_stage(model.stage)
            values = dict(start.named_parameters())
            for name in _trained([model]).keys() - self._kept.keys():
                value = values[name].detach()
                pins = is_accelerator(value.device)
                kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=pins)
                self._kept[name] = kept.copy_(value)
            del start, values  # a second stage is gone before the next one is built

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, passes without gradients are those of the start model, to the bit."""
        trained = _trained(self.runner.local)
        for name, parameter in trained.items():
            self._exchange(name, parameter)
        yield
        for name, parameter in trained.items():
            self._exchange(name, parameter)

    @torch.no_grad()
    def _exchange(self, name: str, parameter: nn.Parameter) -> None:
        kept = self._kept[name]
        if kept.device == parameter.device:
            parameter.data, self._kept[name] = kept, parameter.data
            return
        now = parameter.detach().clone()
        parameter.copy_(kept)
        kept.copy_(now)


def _trained(models: Iterable[Stage]) -> Mapping[str, nn.Parameter]:
    """Return what is trained, by name; what two stages of a rank share is there once."""
    named = {n: p for model in models for n, p in model.named_parameters() if p.requires_grad}
    assert not any(isinstance(p, DTensor) for p in named.values()), "put together by the caller"
    return named
