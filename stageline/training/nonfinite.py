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
        problem: what is known already.
        losses: of the micro-batches, in the order of `runner.loss_order`; empty but on the last
            stage.
        owners: of all trained parameters, in the order of the norms.
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
        if passes := {place: one for _, found in ranks for place, one in found.items()}:
            # a forward pass goes wrong at the first stage, a backward pass at the last
            is_backward, stage = min(
                passes, key=lambda one: (one[0], -one[1] if one[0] else one[1])
            )
            number, name = passes[is_backward, stage]
            what = (
                f"the gradient of {name}" if is_backward else f"what {name or 'the stage'} returned"
            )
            first_passes.append(
                f"run again, {what} on stage {stage}{of} was first bad in "
                f"{_name_batches([number], rows)}"
            )
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
        found: (is backward, stage) -> micro-batch and name of the first bad pass.
    """

    def __init__(self, runner: PipelineRunner, gradients: Mapping[str, nn.Parameter]) -> None:
        super().__init__(runner.device, rank=runner.pp_rank)
        self.models = {model.stage: model for model in runner.local}
        self.gradients = gradients
        self.found: dict[tuple[bool, int], tuple[int, str]] = {}

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        stage, kind, number = action
        bad: list[str] = []  # modules in the order in which they ended, or the first gradient

        def look(module: nn.Module, _: Any, output: Any, *, name: str) -> None:
            tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
            if not all(map(is_finite, tensors)):
                bad.append(name)

        if kind == Kind.FORWARD:
            hooks = [
                module.register_forward_hook(functools.partial(look, name=name))
                for name, module in self.models[stage].named_modules()
            ]
            yield
            for hook in hooks:
                hook.remove()
            if bad and bad[-1]:  # it did not leave the stage: a mask may have inf
                return
        else:
            yield
            names = [name for name, _ in self.models[stage].named_parameters()]
            grads = {n: self.gradients[n].grad for n in names if n in self.gradients}
            bad = [n for n, g in reversed(grads.items()) if g is not None and not is_finite(g)]
        if bad:
            self.found.setdefault((kind != Kind.FORWARD, stage), (number, bad[0]))

    @contextmanager
    def wait(self, action: Action) -> Iterator[None]:
        yield


def _name_batches(numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> str:
    """Return "micro-batches 1, 3 (rows 7, 9, 21)"."""
    if len(numbers) == len(rows) > 1:
        return f"all {len(rows)} micro-batches"
    cut = "..." if len(numbers) > MOST_NAMED else ""
    shown = ", ".join(map(str, numbers[:MOST_NAMED])) + cut
    named = f"micro-batch{'es' * (len(numbers) > 1)} {shown}"
    known = [row for number in numbers for row in rows[number] if row >= 0]
    more = f" ... {len(known)} in all" if len(known) > MOST_NAMED else ""
    return f"{named} (rows {', '.join(map(str, known[:MOST_NAMED]))}{more})" if known else named


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
        spike_sigma: a loss this many standard deviations above the mean of the last
            `SPIKE_WINDOW` finite ones is a spike; 0: off.
        spike_action: whether a step with a spike is skipped or only reported.

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
