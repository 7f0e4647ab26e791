"""Decide which steps change no weight, and find where the numbers of such a step went wrong."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def find_non_finite(
    runner: PipelineRunner,
    micro_batches: Sequence[MicroBatch],
    problem: str,
    *,
    losses: Sequence[torch.Tensor],
    norms: Sequence[float],
    owners: Sequence[Owner],
    run_again: Callable[[Recorder], object] | None,
    gradients: Mapping[str, nn.Parameter],
    replicas: Replicas,
) -> tuple[str, tuple[int, ...]]:
    """Name micro-batch, rows, stage and parameter of a bad step; all ranks call this together.

    Args:
        losses: of the micro-batches, in the order of `runner.loss_order`; empty but on the last
            stage.
        norms, owners: of the gradients of all trained parameters, in one order.
        run_again: runs the passes of the step once more; None where that cannot be done.
        gradients: the parameters of this rank that get gradients.

    Returns:
        Where it went wrong, and the dataset rows of the step, of all replicas; the same on all
        ranks.
    """
    watch = _Watch(runner, gradients)
    if run_again is not None:
        run_again(watch)
    values = zip(runner.loss_order, (loss.item() for loss in losses), strict=False)
    bad_losses = [(number, str(value)) for number, value in values if not math.isfinite(value)]
    gathered: list[Any] = [None] * runner.schedule.num_ranks
    dist.all_gather_object(gathered, (bad_losses, watch.found), group=runner.group)
    # dataset rows of each micro-batch, each once; -1 where they are not known
    names = ("loss_rows", "loss_packed_rows")
    own_rows = [
        list(dict.fromkeys(row for name in names if name in one for row in one[name].tolist()))
        for one in micro_batches
    ]
    told = replicas.gather((own_rows, gathered))

    parts, first_passes = [], []
    for replica, (rows, ranks) in enumerate(told):
        of = f" of replica {replica}" if len(told) > 1 else ""
        if bad_losses := sorted(one for found, _ in ranks for one in found):
            where = _name_batches([number for number, _ in bad_losses], rows)
            parts.append(f"the loss is {bad_losses[0][1]} in {where}{of}")
        # a forward pass goes wrong at the first stage, a backward pass at the last
        passes = sorted(one for _, found in ranks for one in found.values())
        for _, _, number, what in passes[:1]:
            where = _name_batches([number], rows)
            first_passes.append(f"run again, {what}{of} was first bad in {where}")
    bad = [place for place, norm in enumerate(norms) if not math.isfinite(norm)]
    if not parts and bad:
        owner = owners[bad[-1]]  # backward comes to the model's last parameter first
        rank = f", rank {owner.rank}" if len(told) == 1 else ""
        parts = [
            f"the gradient of {owner.name} (stage {owner.stage}{rank}) has the norm "
            f"{norms[bad[-1]]}; {len(bad)} of {len(norms)} are not finite"
        ]
    parts = parts or [problem]
    if run_again is not None:
        parts += first_passes or ["run again, all was finite; if it recurs, test the machine"]
    all_rows = (row for rows, _ in told for batch_rows in rows for row in batch_rows)
    return "; ".join(parts), tuple(row for row in all_rows if row >= 0)


class _Watch(Recorder):
    """A recorder that checks module outputs, and gradients after each backward pass; slow.

    Attributes:
        found: the first bad forward and backward pass of each stage: (is backward, order of
            stages, micro-batch, what was bad).
    """

    def __init__(self, runner: PipelineRunner, gradients: Mapping[str, nn.Parameter]) -> None:
        super().__init__(runner.device, rank=runner.pp_rank)
        self.models = {model.stage: model for model in runner.local}
        self.gradients = gradients
        self.found: dict[tuple[bool, int], tuple[bool, int, int, str]] = {}

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        stage, kind, number = action
        model, is_backward = self.models[stage], kind != Kind.FORWARD
        bad: list[str] = []  # modules in the order in which they ended

        def look(module: nn.Module, _: Any, output: Any, *, name: str) -> None:
            tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
            if not all(map(is_finite, tensors)):
                bad.append(name)

        hooks = [
            module.register_forward_hook(functools.partial(look, name=name))
            for name, module in (() if is_backward else model.named_modules())
        ]
        yield
        for hook in hooks:
            hook.remove()
        what = ""
        if is_backward:
            for name, _ in model.named_parameters():  # the last one that is bad comes first
                grad = self.gradients[name].grad if name in self.gradients else None
                if grad is not None and not is_finite(grad):
                    what = f"the gradient of {name} on stage {stage}"
        elif bad and not bad[-1]:  # it left the stage: a mask inside may have inf
            what = f"what {bad[0] or 'the stage'} returned on stage {stage}"
        if what:
            order = -stage if is_backward else stage
            self.found.setdefault((is_backward, stage), (is_backward, order, number, what))


def _name_batches(numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> str:
    """Return "micro-batches 1, 3 (rows 7, 9, 21)"."""
    if len(numbers) == len(rows) > 1:
        return f"all {len(rows)} micro-batches"
    shown = ", ".join(map(str, numbers[:MOST_NAMED])) + "..." * (len(numbers) > MOST_NAMED)
    known = [row for number in numbers for row in rows[number] if row >= 0]
    more = f" ... {len(known)} in all" if len(known) > MOST_NAMED else ""
    where = f" (rows {', '.join(map(str, known[:MOST_NAMED]))}{more})" if known else ""
    return f"micro-batch{'es' * (len(numbers) > 1)} {shown}{where}"


SPIKE_WINDOW = 64
SPIKE_LEAST = 16  # fewer losses give no useful deviation


@dataclass(frozen=True)
class StepVerdict:
    """Problem of a step, in words, and whether the step may change weights."""

    problem: str | None = None
    is_skipped: bool = False
    is_finite: bool = True


@dataclass
class Skips:
    """Counts of skipped steps, and the rule by which a step is skipped.

    The rule depends on numbers that every rank has and that a checkpoint stores, so all ranks
    and a resumed run decide the same.

    Args:
        max_in_a_row: skipped steps in a row that end a run; 1: the first one does.
        spike_sigma: a loss this many standard deviations above the mean of the last finite ones is
            a spike; 0: off.

    Attributes:
        losses: the last finite ones, spikes included: a level that lasts soon stops being a spike.
    """

    max_in_a_row: int = 20
    spike_sigma: float = 0.0
    spike_action: Literal["warn", "skip"] = "warn"
    total: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)
    losses: list[float] = field(default_factory=list, init=False)

    def judge(self, loss: float, extra_loss: float, grad_norm: float) -> StepVerdict:
        """Decide about one step and count it; every rank calls this once a step."""
        named = {"loss": loss, "router loss": extra_loss, "gradient norm": grad_norm}
        bad = [
            f"the {name} is {value}" for name, value in named.items() if not math.isfinite(value)
        ]
        verdict = StepVerdict()
        if bad:
            verdict = StepVerdict(bad[0], is_skipped=True, is_finite=False)
        elif self.spike_sigma > 0 and len(self.losses) >= SPIKE_LEAST:
            mean, deviation = fmean(self.losses), pstdev(self.losses)
            if loss > mean + self.spike_sigma * deviation:
                verdict = StepVerdict(
                    f"the loss {loss:.4f} is a spike, more than {self.spike_sigma:g} standard "
                    f"deviations ({deviation:.4f}) above the mean {mean:.4f} of the last "
                    f"{len(self.losses)}",
                    is_skipped=self.spike_action == "skip",
                )
        self.total += verdict.is_skipped
        self.in_a_row = self.in_a_row + 1 if verdict.is_skipped else 0
        if math.isfinite(loss):
            self.losses = [*self.losses, loss][-SPIKE_WINDOW:]
        return verdict

    def check(self, problem: str | None, *, step: int) -> None:
        """Raise NonFiniteError after `max_in_a_row` skipped steps, the last being number `step`."""
        if self.in_a_row < self.max_in_a_row:
            return
        which = f"{self.in_a_row} steps in a row up to step {step} were skipped, the last one"
        which = f"step {step} was skipped" if self.max_in_a_row == 1 else which
        raise NonFiniteError(
            f"{which} because {problem}. No weight has changed, and checkpoints are as they were. "
            "Look at these rows, lower `learning_rate`, use `bf16` instead of `fp16`, or allow "
            f"more skipped steps with `bad_steps.max_skipped` (now {self.max_in_a_row})."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])
        self.losses = [float(loss) for loss in state["losses"]]
