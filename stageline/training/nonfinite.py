"""Finds where a step's numbers went wrong: micro-batch, rows of the dataset, stage, parameter.

Called on all ranks, and only for a step that is skipped, so it may talk and run passes again.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from stageline.checkpoint.init import is_finite
from stageline.errors import NonFiniteError
from stageline.pipeline.plan import Action, Kind
from stageline.pipeline.recorder import Recorder
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.grad_norm import Owner
from stageline.training.replicas import Replicas

MOST_NAMED = 8


@dataclass
class _Found:
    """What the ranks of one pipeline saw, as plain values.

    Attributes:
        rows: of the dataset, of each micro-batch; -1 where the loader does not say.
        losses: (micro-batch, value) of those that are no numbers.
        passes: (is_backward, stage, micro-batch, name) of the first bad passes, when the step was
            run again: backward the parameter, forward the module.
    """

    rows: list[list[int]]
    losses: list[tuple[int, str]]
    passes: list[tuple[bool, int, int, str]]


def find_non_finite(
    runner: PipelineRunner,
    micro_batches: Sequence[MicroBatch],
    problem: str,
    *,
    losses: Sequence[torch.Tensor],
    norms: Sequence[float],
    owners: Sequence[Owner],
    run_again: Callable[[Recorder], object] | None,
    gradients: dict[str, nn.Parameter],
    replicas: Replicas,
) -> tuple[str, tuple[int, ...]]:
    """Asks all ranks about one step; every rank calls this, and gets the same.

    Args:
        problem: what is known already.
        losses: of the micro-batches, in the order of `runner.loss_order`; empty but on the last
            stage.
        owners: of all trained parameters, in the order of the norms.
        run_again: runs the passes of the step once more; None where that cannot be done.
        gradients: the parameters of this rank that get gradients.

    Returns:
        Where it went wrong, as far as that can be found out; and the rows of the dataset that the
        step took, of all replicas, empty where the loader does not say.
    """
    passes: list[tuple[bool, int, int, str]] = []
    if run_again is not None:
        recorder = _Watch(runner, gradients)
        with recorder.watching_outputs():
            run_again(recorder)
        passes = recorder.found
    gathered: list[Any] = [None] * runner.schedule.num_ranks
    own = (_bad_losses(losses, runner.loss_order), passes)
    dist.all_gather_object(gathered, own, group=runner.group)
    found = _Found(
        _rows_of(micro_batches),
        losses=[item for rank_losses, _ in gathered for item in rank_losses],
        passes=[item for _, rank_passes in gathered for item in rank_passes],
    )
    told = replicas.gather(found)
    parts = _name_losses(told) or [_name_gradient(norms, owners, len(told)) or problem]
    if run_again is not None:
        parts += _name_passes(told)
    rows = (row for one in told for batch_rows in one.rows for row in batch_rows)
    return "; ".join(parts), tuple(row for row in rows if row >= 0)


def _name_losses(told: Sequence[_Found]) -> list[str]:
    return [
        f"the loss is {one.losses[0][1]} in "
        f"{_name_batches([number for number, _ in one.losses], one.rows)}{_of(replica, told)}"
        for replica, one in enumerate(told)
        if one.losses
    ]


def _name_gradient(norms: Sequence[float], owners: Sequence[Owner], num_replicas: int) -> str:
    """The first bad gradient that the backward pass comes to, which is the model's last."""
    bad = [place for place, norm in enumerate(norms) if not math.isfinite(norm)]
    if not bad:
        return ""
    owner = owners[bad[-1]]
    rank = f", rank {owner.rank}" if num_replicas == 1 else ""
    return (
        f"the gradient of {owner.name} (stage {owner.stage}{rank}) has the norm "
        f"{norms[bad[-1]]}; {len(bad)} of {len(norms)} are not finite"
    )


def _name_passes(told: Sequence[_Found]) -> list[str]:
    parts = []
    for replica, one in enumerate(told):
        if not one.passes:
            continue
        # forward goes wrong at the first stage, backward at the last one
        is_backward, stage, number, name = min(
            one.passes, key=lambda item: (item[0], -item[1] if item[0] else item[1])
        )
        module = name or "the stage itself"
        what = f"the gradient of {name}" if is_backward else f"what {module} returned"
        which = _name_batches([number], one.rows)
        where = f"stage {stage}{_of(replica, told)}"
        parts.append(f"run again, {what} on {where} was first bad in {which}")
    return parts or ["run again, all was finite; if that happens often, test the machine"]


def _of(replica: int, told: Sequence[_Found]) -> str:
    return f" of replica {replica}" if len(told) > 1 else ""


class _Watch(Recorder):
    """Looks at gradients behind each backward pass, and at outputs; slow.

    Attributes:
        found: the first bad passes of this rank, at most one forward and one backward for a stage.
    """

    def __init__(self, runner: PipelineRunner, gradients: dict[str, nn.Parameter]) -> None:
        super().__init__(runner.device, rank=runner.pp_rank)
        self.runner = runner
        self.found: list[tuple[bool, int, int, str]] = []
        self._names = {
            model.stage: [name for name, _ in model.named_parameters() if name in gradients]
            for model in runner.local
        }
        self._gradients = gradients
        self._action: Action | None = None
        self._bad_module = ""  # of this pass, the first one

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        self._action, self._bad_module = action, ""
        yield
        if action.kind == Kind.FORWARD or self._has_found(True, action.stage):
            return
        for name in reversed(self._names[action.stage]):
            grad = self._gradients[name].grad
            if grad is not None and not is_finite(grad):
                self.found.append((True, action.stage, action.micro_batch, name))
                return

    @contextmanager
    def wait(self, action: Action) -> Iterator[None]:
        yield

    @contextmanager
    def watching_outputs(self) -> Iterator[None]:
        """Looks at what stages and their modules return, too."""
        hooks = [
            module.register_forward_hook(functools.partial(self._look, name))
            for model in self.runner.local
            for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Is called by inner modules before outer ones, at last by the stage, whose name is empty.

        What goes bad inside and does not come out of the stage is no fault: a mask may have inf.
        """
        action = self._action
        if action is None or action.kind != Kind.FORWARD or self._has_found(False, action.stage):
            return
        values = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
        if all(map(is_finite, values)):
            return
        self._bad_module = self._bad_module or name
        if not name:
            self.found.append((False, action.stage, action.micro_batch, self._bad_module))

    def _has_found(self, is_backward: bool, stage: int) -> bool:
        return any(item[:2] == (is_backward, stage) for item in self.found)


def _bad_losses(losses: Sequence[torch.Tensor], order: Sequence[int]) -> list[tuple[int, str]]:
    if not losses:
        return []
    values = torch.stack([loss.float() for loss in losses]).tolist()
    return sorted(
        (number, str(value))
        for number, value in zip(order, values, strict=True)
        if not math.isfinite(value)
    )


def _rows_of(micro_batches: Sequence[MicroBatch]) -> list[list[int]]:
    names = ("loss_rows", "loss_packed_rows")
    return [
        # each once: a sample may be several rows
        list(dict.fromkeys(row for name in names if name in batch for row in batch[name].tolist()))
        for batch in micro_batches
    ]


def _name_batches(numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> str:
    if len(numbers) == len(rows) > 1:
        return f"all {len(rows)} micro-batches"
    shown = ", ".join(map(str, numbers[:MOST_NAMED])) + ("..." if len(numbers) > MOST_NAMED else "")
    known = [row for number in numbers for row in rows[number] if row >= 0]
    named = f"micro-batch{'es' * (len(numbers) > 1)} {shown}"
    if not known:
        return named
    more = f" ... {len(known)} in all" if len(known) > MOST_NAMED else ""
    return f"{named} (rows {', '.join(map(str, known[:MOST_NAMED]))}{more})"


SPIKE_WINDOW = 64
SPIKE_LEAST = 16  # of fewer losses the deviation says little


@dataclass(frozen=True)
class StepVerdict:
    """What is wrong with a step, in words, and whether it may change weights."""

    problem: str | None = None
    is_skipped: bool = False
    is_finite: bool = True


@dataclass
class Skips:
    """Judges steps and counts those that are skipped.

    It decides from figures that every rank has, and remembers only what a checkpoint can hold, so
    that all ranks, and a resumed run, decide the same.

    Args:
        max_in_a_row: so many skipped ones in a row end a run; 1: the first one does.
        spike_sigma: a loss so many standard deviations above the mean of the last
            `SPIKE_WINDOW` finite ones is a spike; 0: none is.
        spike_action: whether a step with a spike is skipped, or only told of.

    Attributes:
        total: steps that were skipped since the start of the run.
        in_a_row: those since the last good step.
        losses: the last finite ones, also of spikes: a level that lasts is no spike for long.
    """

    max_in_a_row: int = 20
    spike_sigma: float = 0.0
    spike_action: Literal["warn", "skip"] = "warn"
    total: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)
    losses: list[float] = field(default_factory=list, init=False)

    def judge(self, loss: float, extra_loss: float, grad_norm: float) -> StepVerdict:
        """Decides about one step and counts it; every rank calls this once a step."""
        verdict = self._judge(loss, extra_loss, grad_norm)
        self.total += verdict.is_skipped
        self.in_a_row = self.in_a_row + 1 if verdict.is_skipped else 0
        if math.isfinite(loss):
            self.losses = [*self.losses, loss][-SPIKE_WINDOW:]
        return verdict

    def check(self, problem: str | None, *, step: int) -> None:
        """Raises NonFiniteError where so many steps in a row were skipped as are allowed.

        Args:
            problem: of the last step, number `step`, from 1.
        """
        if self.in_a_row < self.max_in_a_row:
            return
        which = (
            f"step {step} was skipped"
            if self.max_in_a_row == 1
            else f"{self.in_a_row} steps in a row up to step {step} were skipped, the last one"
        )
        raise NonFiniteError(
            f"{which} because {problem}. Finite numbers were expected: no weight has changed, and "
            "checkpoints are as they were. Look at these rows, lower `learning_rate`, use `bf16` "
            "instead of `fp16`, or allow more skipped steps with `bad_steps.max_skipped` (now "
            f"{self.max_in_a_row})."
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; with them a resumed run decides as the uninterrupted one."""
        return {"total": self.total, "in_a_row": self.in_a_row, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = int(state["total"])
        self.in_a_row = int(state["in_a_row"])
        self.losses = [float(loss) for loss in state["losses"]]

    def _judge(self, loss: float, extra_loss: float, grad_norm: float) -> StepVerdict:
        named = {"loss": loss, "router loss": extra_loss, "gradient norm": grad_norm}
        for name, value in named.items():
            if not math.isfinite(value):
                return StepVerdict(f"the {name} is {value}", is_skipped=True, is_finite=False)
        if self.spike_sigma == 0 or len(self.losses) < SPIKE_LEAST:
            return StepVerdict()
        mean, deviation = fmean(self.losses), pstdev(self.losses)
        if loss <= mean + self.spike_sigma * deviation:
            return StepVerdict()
        return StepVerdict(
            f"the loss {loss:.4f} is a spike, more than {self.spike_sigma:g} standard deviations "
            f"({deviation:.4f}) above the mean {mean:.4f} of the last {len(self.losses)}",
            is_skipped=self.spike_action == "skip",
        )
