"""Log-probabilities under the start model, computed once before the first step and kept in a file.

For runs that train more than adapters: later there is no start model any more. The file belongs to
data, template and weights by a key; one of another key is not read. While it is made, each replica
keeps what it has, so that a run that is killed meanwhile goes on from there.

Shapes: N samples of the dataset, K rows of each (chosen and rejected; or its own, and its prompt
with the answer of another row).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stageline.errors import UserError
from stageline.modules.preference_loss import PAIRS
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.agreement import check_agreement
from stageline.training.reference import Source, holds_last_stage, log_probs_of, mixed_batch
from stageline.training.replicas import Replicas

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
        rows = batch["loss_rows"][:: rows_of_sample(batch)]
        values = self.values[rows.clamp(min=0), start:end]
        return torch.where((rows >= 0)[:, None], values, 0).flatten()  # -1 only fills up


def rows_of_sample(batch: MicroBatch) -> int:
    """Rows of a micro-batch that one sample became."""
    return 2 if PAIRS in batch else 1


class TableMaker:
    """Reads the table of one dataset, or makes it; every rank calls it.

    Args:
        path: of the file.
        key: of data, template and weights.
        needs_kl: whether the loss wants answers of other rows, too.
        say: tells how far it is.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        path: Path,
        key: str,
        needs_kl: bool,
        replicas: Replicas | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.runner = runner
        self.path = path
        self.key = key
        self.needs_kl = needs_kl
        self.replicas = replicas or Replicas()
        self.say = say
        self.is_last = holds_last_stage(runner)
        self.part_path = path.with_name(f"{path.stem}.part{self.replicas.rank}.safetensors")

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
        if self._any(values is not None):
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
            bad = torch.isnan(values).any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise UserError(
                    f"the start model gives no log-probability for row {bad[0]} ({len(bad)} rows "
                    "in all). Numbers were expected, because the loss compares with them: look at "
                    "the row and at the model, or use another precision (--bf16 in the place of "
                    "--fp16)."
                )
            _write(self.path, values, self.key)
            self.part_path.unlink(missing_ok=True)
        return FromTable(values)

    def _made(
        self, batches: Iterable[Sequence[MicroBatch]], num_samples: int, num_batches: int
    ) -> torch.Tensor | None:
        """What this replica has a share in; NaN elsewhere."""
        values, done = _read(self.part_path, self.key) if self.is_last else (None, 0)
        first = self._least(done)
        every = max(num_batches // NUM_NOTES, 1)
        for number, micro_batches in enumerate(batches):
            if number < first:
                continue
            check_agreement(micro_batches, group=self.runner.group)
            values = self._add(values, micro_batches, num_samples)
            if self.is_last and (number + 1) % SAVE_EVERY == 0:
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

    # -- what ranks agree on -------------------------------------------------------------------

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

    def _any(self, flag: bool) -> bool:
        """Whether the rank of the last stage says so; the same for all replicas."""
        told = [flag]
        dist.broadcast_object_list(told, src=self.runner.last_stage_rank, group=self.runner.group)
        return told[0]

    def _least(self, done: int) -> int:
        """Batches that every replica has done."""
        told = [min(self.replicas.gather(done))]
        dist.broadcast_object_list(told, src=self.runner.last_stage_rank, group=self.runner.group)
        return told[0]


def weights_fingerprint(folder: str | Path | None) -> str:
    """Tells files of weights apart by names, sizes and ends; reads no more of them."""
    told = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")) if folder else ():
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
