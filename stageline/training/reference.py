"""What a loss over preferences has to know of the start model, added to each step's micro-batches.

Before a step's schedule the same stages run forward once more, without gradients and dropout: with
adapters off, or, where more than adapters is trained, not at all, because the log-probabilities
were computed before the first step. There is never a second copy of the weights.

The rank of the last stage adds `loss_reference` [rows] to each micro-batch and, where the loss asks
for it, `loss_kl`: the mean log-ratio of model and reference over prompts with the answers of other
rows (`loss_kl_*` of the micro-batches), of the whole step and all replicas, and at least 0.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stageline import progress
from stageline.data.batches.batch import READ_OFF_IDS
from stageline.errors import UserError
from stageline.hub import name_of
from stageline.modules.lora import adapters_off, begun_adapters, trained_besides
from stageline.modules.losses import KL, PAIRS, REFERENCE, row_lengths, row_log_probs
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.agreement import check_agreement
from stageline.training.loss_part import LossPart, Output, logits_of
from stageline.training.replicas import Replicas
from stageline.training.step import StepProgress

Mode = Literal["auto", "adapters_off", "precompute", "columns", "frozen_copy"]
# rows [B] of each micro-batch, then of each one with the answers of other rows
Source = Callable[[Sequence[MicroBatch], Sequence[MicroBatch]], list[torch.Tensor]]
KL_PREFIX = "loss_kl_"
T = TypeVar("T")


class Reference:
    """Prepares micro-batches; every rank of a pipeline calls it with the same ones.

    Args:
        loss: says what it asks for; mostly nothing.
        source: gives the log-probabilities under the reference, where the last stage is; None: the
            same stages with adapters off.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        loss: LossPart,
        source: Source | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.runner = runner
        self.needs_reference = loss.needs_reference
        self.needs_kl = loss.needs_kl
        self.source = source or functools.partial(with_adapters_off, runner)
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
            "`collate_fn` kto, or a loss without that term (`loss_fn.use_kl` false)."
        )
    # pixels and what else belongs to the images of the prompts is the same
    dropped = ("labels", *READ_OFF_IDS)
    own = {n: v for n, v in batch.items() if n not in dropped and not n.startswith("loss_")}
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
        told = StepProgress(device=runner.device, forward="reference")
        runner.evaluate(batches, on_output=take, recorder=told)
    return found


def with_adapters_off(
    runner: PipelineRunner, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """The source of a run that trains adapters alone: the same stages without them."""
    with adapters_off(runner.local):
        return log_probs_of(runner, [*batches, *mixed])


def from_columns(
    runner: PipelineRunner, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """The source of a dataset whose rows bring the log-probabilities."""
    missing = next((n for n, batch in enumerate(batches) if REFERENCE not in batch), None)
    if missing is not None or mixed:
        what = "answers of other rows" if mixed else f"micro-batch {missing}"
        raise UserError(
            f"`reference` columns: the rows bring no log-probabilities for {what}. "
            "ref_chosen_logps and ref_rejected_logps (dpo), or ref_logps (kto without its KL "
            "term), were expected in every row, of training and held-out data: add them, or "
            "use `reference` auto."
        )
    if not holds_last_stage(runner):
        return []
    return [batch[REFERENCE] for batch in batches]


def choose_mode(
    mode: Mode,
    runner: PipelineRunner,
    *,
    has_columns: bool,
    begun_as: Mode | None,
    otherwise: Mode = "precompute",
) -> tuple[Mode, str]:
    """How the reference of a run is come by, the same on all ranks, and why.

    Every rank calls this once, before the first step of this process.

    Args:
        has_columns: the rows bring their log-probabilities.
        begun_as: how it was come by when the run began; None: it begins. Adapters that did not
            start at zero cannot be told any more once they are trained.
        otherwise: what auto means where adapters off would not be the start model.

    Raises:
        UserError: adapters off would not be the model that training began with.
    """
    if mode == "auto" and begun_as is not None:
        return begun_as, "as the run began"
    if mode == "auto" and has_columns:
        return "columns", "the rows bring them"
    if mode not in ("auto", "adapters_off"):
        return mode, "as asked for"
    reason = _why_not_off(runner, is_resumed=begun_as is not None)
    if reason is None:
        return "adapters_off", "adapters alone are trained"
    if mode == "auto":
        return otherwise, reason
    raise UserError(
        f"`reference` adapters_off: {reason}, so the model without adapters is not the one that "
        "training began with. Adapters that start at zero and nothing else were expected to be "
        "trained: freeze the rest (`frozen_lm_head`, `frozen_llm` ...), or use `reference` "
        f"{otherwise}."
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


# -- log-probabilities under the start model, computed once before the first step and kept in a file
# For runs that train more than adapters: later there is no start model any more. The file belongs
# to data, template and weights by a key; one of another key is not read. While it is made, each
# replica keeps what it has, so that a run that is killed meanwhile goes on from there.
#
# Shapes: N samples of the dataset, K rows of each (chosen and rejected; or its own, and its prompt
# with the answer of another row).

SAVE_EVERY = 50  # batches between two saves of what is not finished
NUM_NOTES = 10  # times that it says how far it is
_SAMPLED = 1 << 16  # bytes of each end of a file of weights that its fingerprint is made of


class FromTable:
    """The source of a run whose reference was computed before it began.

    Args:
        values: [N, K]; None where the last stage is not.
    """

    def __init__(self, values: torch.Tensor | None) -> None:
        self.values = values

    def __call__(
        self, batches: Sequence[MicroBatch], mixed: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        if self.values is None:
            return []
        num_own = self.values.shape[1] - (1 if mixed else 0)
        own = [self._of(batch, 0, num_own) for batch in batches]
        return own + [self._of(batch, num_own, num_own + 1) for batch in batches[: len(mixed)]]

    def _of(self, batch: MicroBatch, start: int, end: int) -> torch.Tensor:
        assert self.values is not None  # the caller looked
        rows = batch["loss_rows"][:: rows_of_sample(batch)]
        values = self.values[rows.clamp(min=0), start:end]
        return torch.where((rows >= 0)[:, None], values, 0).flatten()  # -1 only fills up


def rows_of_sample(batch: MicroBatch) -> int:
    """Rows of a micro-batch that one sample became."""
    return 2 if PAIRS in batch else 1


@dataclass
class TableMaker:
    """Reads the table of one dataset, or makes it; every rank calls it.

    Args:
        path: of the file.
        key: of data, template and weights.
        needs_kl: whether the loss wants answers of other rows, too.
        say: tells how far it is.
    """

    runner: PipelineRunner
    _: KW_ONLY
    path: Path
    key: str
    needs_kl: bool
    replicas: Replicas = field(default_factory=Replicas)
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.is_last = holds_last_stage(self.runner)
        part = f"{self.path.stem}.part{self.replicas.rank}.safetensors"
        self.part_path = self.path.with_name(part)

    def __call__(
        self,
        batches: Iterable[Sequence[MicroBatch]],
        *,
        num_samples: int,
        num_batches: int,
        is_start: bool,
    ) -> Source:
        """The table.

        Args:
            batches: an evaluation of the dataset: each row once, with `loss_rows`.
            is_start: nothing has been trained, so the table can be made.

        Raises:
            UserError: it is not there, and the start model no longer is either; or the start
                model gives no number for a row.
        """
        values, _ = _read(self.path, self.key) if self.is_last else (None, 0)
        values = self._first(values, of=num_samples)
        if self._of_last(values is not None):
            return FromTable(values)
        if not is_start:
            raise UserError(
                f"{self.path} is not there, or belongs to other data, another template or another "
                "start model. It was expected, because the run compares with the model that it "
                "began with, which is not there any more: give the run folder back its reference "
                "folder, or start anew."
            )
        self.say(f"computing log-probabilities of {num_samples} rows under the start model")
        values = self._first(self._made(batches, num_samples, num_batches), of=num_samples)
        if self.is_last:
            assert values is not None  # they are made here
            bad = torch.isnan(values).any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise UserError(
                    f"the start model gives no log-probability for row {bad[0]} ({len(bad)} rows "
                    "in all). Numbers were expected, because the loss compares with them: look at "
                    "the row and at the model, or use another precision (`bf16` in the place of "
                    "`fp16`)."
                )
            _write(self.path, values, self.key)
            self.part_path.unlink(missing_ok=True)
        return FromTable(values)

    def _made(
        self, batches: Iterable[Sequence[MicroBatch]], num_samples: int, num_batches: int
    ) -> torch.Tensor | None:
        """What this replica has a share in; NaN elsewhere."""
        values, done = _read(self.part_path, self.key) if self.is_last else (None, 0)
        first = self._of_last(min(self.replicas.gather(done)))  # that every replica has done
        every = max(num_batches // NUM_NOTES, 1)
        for number, micro_batches in enumerate(batches):
            if number < first:
                continue
            check_agreement(micro_batches, group=self.runner.group)
            values = self._add(values, micro_batches, num_samples)
            if self.is_last and values is not None and (number + 1) % SAVE_EVERY == 0:
                _write(self.part_path, values, self.key, done=number + 1)
            if (number + 1) % every == 0:
                self.say(f"reference: {number + 1} of {num_batches} batches")
        return values

    def _add(
        self, values: torch.Tensor | None, batches: Sequence[MicroBatch], num_samples: int
    ) -> torch.Tensor | None:
        mixed = [mixed_batch(batch) for batch in batches] if self.needs_kl else []
        found = log_probs_of(self.runner, [*batches, *mixed])
        if not self.is_last:
            return None
        for number, batch in enumerate(batches):
            rows = batch["loss_rows"]
            times = rows_of_sample(batch)
            made = found[number].view(-1, times)
            if mixed:
                made = torch.cat([made, found[len(batches) + number][:, None]], dim=1)
            if values is None:
                values = torch.full((num_samples, made.shape[1]), torch.nan, dtype=made.dtype)
            samples = rows[::times]
            is_real = samples >= 0
            values[samples[is_real]] = made.cpu()[is_real]
        return values

    def _first(self, values: torch.Tensor | None, *, of: int) -> torch.Tensor | None:
        """The tables of all replicas as one, where the last stage is."""
        if values is not None and len(values) != of:
            values = None
        told = [one for one in self.replicas.gather(values) if one is not None]
        if not told:
            return None
        merged = told[0]
        for other in told[1:]:
            merged = torch.where(torch.isnan(merged), other, merged)
        return merged

    def _of_last(self, value: T) -> T:
        """What the rank of the last stage says."""
        told = [value]
        dist.broadcast_object_list(told, src=self.runner.last_stage_rank, group=self.runner.group)
        return told[0]


def weights_fingerprint(folder: Path) -> str:
    """Tells files of weights apart by names, sizes and ends; reads no more of them."""
    name = name_of(folder)
    if name is not None:  # which files are here already says nothing
        return str(name)
    told = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
        size = path.stat().st_size
        told.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(size - _SAMPLED, 0)):
                file.seek(start)
                told.update(file.read(_SAMPLED))
    return told.hexdigest()


def _read(path: Path, key: str) -> tuple[torch.Tensor | None, int]:
    """Values and batches done; (None, 0) where there is no such file, or one of another key."""
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            if told.get("key") != key:
                return None, 0
            return file.get_tensor("log_probs"), int(told.get("done", 0))
    except (OSError, SafetensorError):
        return None, 0


def _write(path: Path, values: torch.Tensor, key: str, *, done: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({"log_probs": values.contiguous()}, draft, metadata={"key": key, "done": str(done)})
    draft.replace(path)  # at once: a file of this name is whole
