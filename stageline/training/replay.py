"""A drill against silent data corruption: a step is run twice, and must give the same bits.

Where it does not, a third run tells a fault that came once from one that comes each time, as
Megatron-LM's rerun state machine does. Not here: whether the first result was the wrong one. That
takes another machine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from stageline.errors import NotReproducible, ResultRejected
from stageline.modules.random_state import RandomState
from stageline.pipeline.runner import PipelineRunner
from stageline.training.precision import MasterWeights
from stageline.training.replicas import Replicas, bit_sum, bits_of
from stageline.training.step_loss import StepLoss

KINDS = ("a weight changed between the runs", "its output", "its loss", "its gradients")


class Difference(NamedTuple):
    """One thing on one stage that had other bits; the least one is nearest to the cause.

    Attributes:
        kind: index into KINDS: the cause, or what it came to first.
        order: outputs go wrong from the first stage on, gradients from the last one back.
    """

    kind: int
    order: int
    stage: int
    rank: int
    name: str = ""

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"stage {self.stage} on rank {self.rank}: {KINDS[self.kind]}{name}"


@dataclass
class _Trace:
    """What a run of the passes left behind on this rank."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)


class Replay:
    """Runs steps twice.

    Args:
        every: so many optimizer steps apart; 0: never.
        stage_of: name -> stage, of this rank's trained parameters.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        weights: MasterWeights,
        *,
        every: int,
        stage_of: dict[str, int],
        replicas: Replicas,
    ) -> None:
        assert not (every and weights.shares), "gradients of shares are not there yet"
        self.runner = runner
        self.weights = weights
        self.every = every
        self.stage_of = stage_of
        self.replicas = replicas

    def is_due(self, step: int) -> bool:
        """Whether step number `step`, counted from 0, is run twice."""
        return self.every > 0 and (step + 1) % self.every == 0

    def __call__(self, run: Callable[[], StepLoss], *, step: int) -> StepLoss:
        """Runs the passes of a step twice; the gradients of the first run are kept.

        Args:
            run: zeroes the gradients and runs all passes.

        Raises:
            NotReproducible: the second run differed, and a third one agreed with either.
            ResultRejected: all three differed.
        """
        state = RandomState(self.runner.device)
        loss_of, first = self._run(run)
        with state.replayed():
            second = self._run(run)[1]
            differences = self._differences(first, second)
            if self._is_anywhere(bool(differences)):
                third = self._run(run)[1]
                self._end(first, second, third, differences, step=step)
        for name, grad in first.grads.items():
            self.weights.parameters[name].grad = grad
        return loss_of

    def _run(self, run: Callable[[], StepLoss]) -> tuple[StepLoss, _Trace]:
        trace = _Trace()
        for model in self.runner.local:
            for name, weight in model.named_parameters():
                trace.weights[name] = bit_sum(weight)
        with self._tracing_outputs(trace):
            loss_of = run()
        trace.losses = loss_of.each
        trace.grads = {name: p.grad for name, p in self.weights.parameters.items()}
        return loss_of, trace

    @contextmanager
    def _tracing_outputs(self, trace: _Trace) -> Iterator[None]:
        def keep(model: nn.Module, _: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            trace.outputs.setdefault(model.stage, []).extend(map(bit_sum, outputs))

        hooks = [model.register_forward_hook(keep) for model in self.runner.local]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _differences(self, one: _Trace, other: _Trace) -> list[Difference]:
        rank = dist.get_rank()
        found = []
        for model in self.runner.local:
            stage = model.stage
            for name, _ in model.named_parameters():
                if not torch.equal(one.weights[name], other.weights[name]):
                    found.append(Difference(0, stage, stage, rank, name))
            if _differ(one.outputs.get(stage, []), other.outputs.get(stage, [])):
                found.append(Difference(1, stage, stage, rank))
        last = self.runner.schedule.num_stages - 1
        if _differ(one.losses, other.losses):
            found.append(Difference(2, last, last, rank))
        for name, stage in self.stage_of.items():
            if _differ([one.grads[name]], [other.grads[name]]):
                found.append(Difference(3, -stage, stage, rank, name))
        return found

    def _is_anywhere(self, flag: bool) -> bool:
        shared = torch.tensor(float(flag), device=self.runner.device)
        dist.all_reduce(shared, group=self.runner.group)
        return sum(self.replicas.sum([shared.item()])) > 0

    def _end(
        self,
        first: _Trace,
        second: _Trace,
        third: _Trace,
        differences: list[Difference],
        *,
        step: int,
    ) -> None:
        own = (
            sorted(differences),
            bool(self._differences(first, third)),
            bool(self._differences(second, third)),
        )
        gathered: list[Any] = [None] * self.runner.schedule.num_ranks
        dist.all_gather_object(gathered, own, group=self.runner.group)
        told = [facts for pipeline in self.replicas.gather(gathered) for facts in pipeline]
        found = sorted(Difference(*item) for items, _, _ in told for item in items)
        is_first_odd = any(differs for _, differs, _ in told)
        is_second_odd = any(differs for _, _, differs in told)
        others = f" ({len(found)} differences in all)" if len(found) > 1 else ""
        what = f"step {step + 1} gave other bits when it was run again. {found[0]}{others}"
        if is_first_odd and is_second_odd:
            raise ResultRejected(
                f"{what}. A third run differed from both. Equal bits were expected. The results "
                "of this machine cannot be used, or the model has a part that is not "
                "deterministic: resume the last checkpoint on another machine, and "
                "test this one; the same message there means the model."
            )
        agrees = "second" if is_first_odd else "first"
        raise NotReproducible(
            f"{what}. A third run agreed with the {agrees}, so the fault came once. Equal bits "
            "were expected. No weight was updated with them: resume the last checkpoint on "
            "another machine; if the step differs there too, the model is not deterministic."
        )


def _differ(
    ones: list[torch.Tensor] | list[torch.Tensor | None],
    others: list[torch.Tensor] | list[torch.Tensor | None],
) -> bool:
    if len(ones) != len(others):
        return True
    return any(
        (one is None) != (other is None)
        or (one is not None and not torch.equal(bits_of(one), bits_of(other)))
        for one, other in zip(ones, others, strict=True)
    )
