"""Run the passes of an optimizer step or an evaluation on a rank's stages, without optimizer.

Gradient accumulation is more micro-batches in one call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline import progress
from stageline.errors import UserError
from stageline.modules.layer_seeds import LayerSeeds
from stageline.pipeline.plan import (
    Action,
    Kind,
    Plan,
    add_transfers,
    drop_dead_backward,
    forward_orders,
)
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.schedules import Schedule, make_schedule
from stageline.pipeline.stage_passes import MicroBatch, StagePasses, Tensors
from stageline.pipeline.torch_runtime import PlanRuntime, torch_schedule
from stageline.pipeline.torch_stage import Channels, StagelineStage, TorchSchedule, run_step
from stageline.stage import Stage

MOST_UNSENT = 2  # sends of a rank under way, in forward-only runs
# the same in training on gloo, where a send reports that it has completed only after `wait`
MOST_UNSENT_ON_GLOO = 4


class LocalStages:
    """One or several stage models of a rank, in the order of the model.

    A weight that two of them hold under one name (tied embedding and head) becomes one tensor.
    """

    def __init__(self, models: Stage | Sequence[Stage]) -> None:
        self.models: list[Stage] = list(models) if isinstance(models, Sequence) else [models]
        self.num_stages: int = self.models[0].num_stages
        self.parameter_order: list[str] = self.models[0].parameter_order
        first: dict[str, nn.Parameter] = {}
        for model in self.models:
            replaced: dict[int, nn.Parameter] = {}
            for name, parameter in model.named_parameters():
                kept = first.setdefault(name, parameter)
                if kept is not parameter:
                    assert kept.shape == parameter.shape and torch.equal(kept, parameter), name
                    replaced[id(parameter)] = kept
            for module in model.modules() if replaced else ():
                for name, held in module._parameters.items():
                    if held is not None and id(held) in replaced:
                        module._parameters[name] = replaced[id(held)]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.models)

    @property
    def indices(self) -> list[int]:
        return [model.stage for model in self.models]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name; a shared one once."""
        return {name: p for model in self.models for name, p in model.named_parameters()}

    def part_of(self, name: str) -> str | None:
        """The part of the model that a parameter belongs to; None: in no part, or not known."""
        return getattr(self.models[0], "part_of", lambda name: None)(name)

    def train(self, mode: bool = True) -> None:
        for model in self.models:
            model.train(mode)


Output = torch.Tensor | Tensors
LossFn = Callable[[Output, MicroBatch], torch.Tensor]


class PipelineRunner:
    """Runner of the stages of one rank; all ranks call the same methods with the same batch.

    Args:
        models: the stage models of this rank, on `device`; one, or several in their order.
        group: the pipeline's process group.
        channels: if a group runs its transfers one after the other (NCCL), one for each pair
            of `schedule.pairs`.
        saving: a context entered around each forward pass that keeps a graph, such as one that
            moves saved tensors to host memory.
        seed: of the random numbers of training steps; None: the generators are not seeded.

    Attributes:
        flow: which stages have a backward pass.
        seeds: is told which step begins; `step` ends it.
    """

    def __init__(
        self,
        models: Stage | Sequence[Stage],
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        schedule: Schedule | str = "1f1b",
        saving: Callable[[], AbstractContextManager] = nullcontext,
        seed: int | None = None,
        channels: Channels | None = None,
    ) -> None:
        self.local = LocalStages(models)
        self.device, self.group = device, group
        self.pp_rank = dist.get_rank(group)
        if isinstance(schedule, str):
            count = len(self.local.models)
            schedule = make_schedule(
                schedule,
                num_ranks=dist.get_world_size(group),
                stages_per_rank=count if count > 1 else None,
            )
        self.schedule = schedule
        if self.local.indices != (placed := schedule.stages_of(self.pp_rank)):
            raise UserError(
                f"rank {self.pp_rank} was given stages {self.local.indices}, `schedule` "
                f"{schedule.name} places {placed} there. Build those."
            )
        self.seeds = LayerSeeds(self.local, seed=seed, devices=[device])
        pairs = [pair for pair in self.schedule.pairs if self.pp_rank in pair]
        assert device.type == "cpu" or set(pairs) <= set(channels or ()), pairs
        self.stages = StagelineStage.of(
            self.local.models, device, group, saving=saving, seeds=self.seeds, channels=channels
        )
        self.flow = self.stages[0].flow
        self.num_micro_batches = 0
        self._runtimes: dict[tuple[int, bool], PlanRuntime] = {}

    @property
    def last_stage_rank(self) -> int:
        """The global rank that holds the last stage, where the losses are."""
        peer = self.schedule.last_stage_rank
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent to others in the last step or evaluation."""
        return sum(stage.sent_bytes for stage in self.stages)

    @property
    def passes(self) -> dict[int, StagePasses]:
        return {stage.stage_index: stage.passes for stage in self.stages}

    @property
    def loss_order(self) -> list[int]:
        """The micro-batches of the last step, in the order in which the last stage meets them."""
        return [
            item.micro_batch
            for item in self._plan(self.num_micro_batches)
            if isinstance(item, Action)
            and item.kind == Kind.FORWARD
            and item.stage == self.schedule.num_stages - 1
        ]

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss_fn: LossFn,
        recorder: Recorder = NO_RECORDER,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients add up in `.grad`.

        Returns:
            The summed loss, a scalar in float32; zero where the last stage is not.
        """
        self.num_micro_batches = len(micro_batches)
        try:
            losses = self._run_step(micro_batches, loss_fn, recorder)
        finally:
            self.seeds.end()
        # one by one, as a loop over micro-batches would add them
        return sum((loss.detach().float() for loss in losses), torch.zeros((), device=self.device))

    def _run_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, recorder: Recorder
    ) -> list[torch.Tensor]:
        runtime = self._runtime(len(micro_batches), has_backward=True)
        most_unsent = MOST_UNSENT_ON_GLOO if self.device.type == "cpu" else None
        return runtime.run(micro_batches, loss_fn, most_unsent=most_unsent, recorder=recorder)

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        on_output: Callable[[Output, MicroBatch], None],
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        """Forward only; `on_output` gets each output where the last stage is. Nothing is kept."""

        def take(output: Output, batch: MicroBatch) -> tuple[()]:
            on_output(output, batch)
            return ()

        was_training = self.local.models[0].training
        self.local.train(False)
        try:
            runtime = self._runtime(len(micro_batches), has_backward=False)
            runtime.run(micro_batches, take, most_unsent=MOST_UNSENT, recorder=recorder)
        finally:
            self.local.train(was_training)

    def _runtime(self, num_micro_batches: int, *, has_backward: bool) -> PlanRuntime:
        key = (num_micro_batches, has_backward)
        if key not in self._runtimes:
            rank_of_stage = self.schedule.rank_of_stage
            if has_backward:
                plan = self._plan(num_micro_batches)
            else:
                orders = forward_orders(rank_of_stage, num_micro_batches)
                plan = add_transfers(orders, rank_of_stage)[self.pp_rank]
            self._runtimes[key] = PlanRuntime(
                self.stages, plan, rank_of_stage=rank_of_stage, num_micro_batches=num_micro_batches
            )
        return self._runtimes[key]

    def _plan(self, num_micro_batches: int) -> Plan:
        orders = drop_dead_backward(self.schedule.orders(num_micro_batches), self.flow)
        return add_transfers(orders, self.schedule.rank_of_stage, self.flow)[self.pp_rank]


class TorchPipelineRunner(PipelineRunner):
    """Runs training steps with PyTorch's schedule class: its order, transfers and communicator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schedules: dict[int, TorchSchedule] = {}

    def _run_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, recorder: Recorder
    ) -> list[torch.Tensor]:
        count = len(micro_batches)
        if count not in self._schedules:
            self.schedule.check(count)
            self._schedules[count] = torch_schedule(self.schedule, self.stages, count)
        # between passes a rank waits in PyTorch's loop for a transfer
        with progress.doing("a transfer of torch's schedule", is_waiting=True):
            return run_step(
                self._schedules[count], self.stages, micro_batches, loss_fn, recorder=recorder
            )
