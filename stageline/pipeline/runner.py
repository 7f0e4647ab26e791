"""Runs one optimizer step's passes, or an evaluation, of a rank's stages. Knows no optimizer.

Gradient accumulation is more micro-batches in one call.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from stageline.errors import UserError
from stageline.modules.layer_seeds import LayerSeeds
from stageline.pipeline.actions import Action, Kind
from stageline.pipeline.borders import batch_input, batch_output, check_borders, describe_borders
from stageline.pipeline.executor import MOST_UNSENT, Executor, StepInputs
from stageline.pipeline.local_stages import LocalStages
from stageline.pipeline.plan import (
    GradFlow,
    Plan,
    add_transfers,
    drop_dead_backward,
    forward_orders,
    grad_flow,
)
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.schedules import Schedule, make_schedule
from stageline.pipeline.stage_passes import MicroBatch, StagePasses, Tensors

Output = torch.Tensor | Tensors
LossFn = Callable[[Output, MicroBatch], torch.Tensor]


class PipelineRunner:
    """Drives the stages of one rank; all ranks call the same methods with the same batch.

    Args:
        models: the stage models of this rank, on `device`; one, or several in their order.
        group: the pipeline's process group.
        schedule: a `Schedule`, or the name of one.
        saving: a context entered around each forward pass that keeps a graph, such as one that
            moves what is saved to host memory.
        seed: of what training steps draw at random; None leaves the generators alone.

    Attributes:
        local: this rank's stages.
        flow: which stages have a backward pass.
        seeds: is told which step begins; `step` ends it.
        num_micro_batches: of the last step.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        schedule: Schedule | str = "1f1b",
        saving: Callable[[], AbstractContextManager] = nullcontext,
        seed: int | None = None,
    ) -> None:
        self.local = LocalStages(models)
        self.device = device
        self.group = group
        self.pp_rank = dist.get_rank(group)
        self.schedule = _resolve(schedule, self.local, num_ranks=dist.get_world_size(group))
        self._check_placement()
        self.flow = self._learn_flow()
        self.seeds = LayerSeeds(self.local, seed=seed, device=device)
        self.passes = {
            model.stage: StagePasses(
                model,
                computes_grad=self.flow.computes[model.stage],
                sends_grad=self.flow.sends[model.stage],
                saving=saving,
                seeds=self.seeds,
            )
            for model in self.local
        }
        self._executor = Executor(
            self.passes,
            rank_of_stage=self.schedule.rank_of_stage,
            device=device,
            group=group,
        )
        self.num_micro_batches = 0
        self._plans: dict[tuple[int, bool], Plan] = {}

    @property
    def last_stage_rank(self) -> int:
        """The global rank that holds the last stage, where the losses are."""
        peer = self.schedule.last_stage_rank
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    @property
    def sent_bytes(self) -> int:
        """What this rank sent to others in the last step or evaluation, forward and back."""
        return self._executor.sent_bytes

    @property
    def loss_order(self) -> list[int]:
        """The micro-batches of the last step, in the order in which the last stage meets them."""
        return [
            item.micro_batch
            for item in self._plan(self.num_micro_batches, has_backward=True)
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

        Args:
            loss_fn: (output of the last stage, micro-batch) -> its share of the loss.

        Returns:
            The summed loss, a scalar in float32; zero where the last stage is not.
        """
        self.num_micro_batches = len(micro_batches)
        plan = self._plan(self.num_micro_batches, has_backward=True)
        inputs = self._inputs(micro_batches, loss_fn)
        try:
            losses = self._executor.run(plan, inputs, recorder=recorder)
        finally:
            self._executor.clear()
            self.seeds.end()
        # one by one, as a loop over micro-batches would add them
        return sum((loss.detach().float() for loss in losses), torch.zeros((), device=self.device))

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        on_output: Callable[[Output, MicroBatch], None],
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        """Forward only, any number of micro-batches; no graph and no output is kept.

        Args:
            on_output: called where the last stage is, with its output for each micro-batch.
        """

        def take(output: Output, batch: MicroBatch) -> tuple[()]:
            on_output(output, batch)
            return ()

        was_training = self.local.training
        self.local.train(False)
        plan = self._plan(len(micro_batches), has_backward=False)
        try:
            inputs = self._inputs(micro_batches, take)
            self._executor.run(plan, inputs, most_unsent=MOST_UNSENT, recorder=recorder)
        finally:
            self._executor.clear()
            self.local.train(was_training)

    def _plan(self, num_micro_batches: int, *, has_backward: bool) -> Plan:
        key = (num_micro_batches, has_backward)
        if key not in self._plans:
            rank_of_stage = self.schedule.rank_of_stage
            if has_backward:
                orders = drop_dead_backward(self.schedule.orders(num_micro_batches), self.flow)
                plans = add_transfers(orders, rank_of_stage, self.flow)
            else:
                plans = add_transfers(
                    forward_orders(rank_of_stage, num_micro_batches), rank_of_stage
                )
            self._plans[key] = plans[self.pp_rank]
        return self._plans[key]

    def _inputs(self, micro_batches: Sequence[MicroBatch], loss_fn: Callable) -> StepInputs:
        metas = {}
        for model in self.local:
            metas[model.stage] = [batch_input(model, batch) for batch in micro_batches]
            metas[model.stage + 1] = [batch_output(model, batch) for batch in micro_batches]
        return StepInputs(micro_batches, metas, loss_fn)

    def _check_placement(self) -> None:
        expected = self.schedule.stages_of(self.pp_rank)
        if self.local.indices != expected:
            raise UserError(
                f"rank {self.pp_rank} was given stages {self.local.indices}, --schedule "
                f"{self.schedule.name} places {expected} there: build those."
            )

    def _learn_flow(self) -> GradFlow:
        """Learns, once, which stages train and whether neighbours agree on their border."""
        own = [describe_borders(model) for model in self.local]
        gathered: list[list | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, own, group=self.group)
        facts = sorted((fact for facts in gathered for fact in facts), key=lambda f: f.stage)
        check_borders(facts)
        return grad_flow([fact.trains for fact in facts])


def _resolve(schedule: Schedule | str, local: LocalStages, *, num_ranks: int) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    stages_per_rank = len(local.models) if len(local.models) > 1 else None
    return make_schedule(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
