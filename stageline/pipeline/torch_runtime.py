"""Execute plans with PyTorch's schedule runtime: its loop over actions, and its receives.

The plan contains the receives and omits backward passes that nothing needs. A custom function per
compute action waits for the receive, so that the wait is named and timed, starts the send, and
passes tensors on between the stages of one rank.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from stageline.errors import UserError
from stageline.pipeline.plan import Action, Kind, Plan
from stageline.pipeline.recorder import Recorder
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import MicroBatch
from stageline.pipeline.torch_stage import Sends, StagelineStage, TorchSchedule, run_step


class PlanRuntime(_PipelineScheduleRuntime):
    """A schedule of PyTorch that executes the plan of this rank."""

    def __init__(
        self,
        stages: Sequence[StagelineStage],
        plan: Plan,
        *,
        rank_of_stage: Sequence[int],
        num_micro_batches: int,
    ) -> None:
        super().__init__(list(stages), num_micro_batches, scale_grads=False)
        for stage in stages:
            stage.stage_index_to_group_rank = dict(enumerate(rank_of_stage))
        self.stage_of = {stage.stage_index: stage for stage in stages}
        # a send follows the pass that makes its tensor, so `_compute` starts it: every action of
        # PyTorch's loop costs its profiler's ranges, torch 2.15 has a third one per transfer
        order = []
        for item in plan:
            if isinstance(item, Action) or not item.is_send:
                receive = "RECV_B" if getattr(item, "is_grad", False) else "RECV_F"
                kind = _ComputationType(getattr(item, "kind", receive))
                order.append(_Action(item.stage, kind, item.micro_batch))
        self.pipeline_order_with_comms = {self.rank: order}
        for own in Kind:
            self.register_custom_function(_ComputationType(own.value), self._compute)

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_of: Callable[[Any, MicroBatch], Any],
        *,
        most_unsent: int | None,
        recorder: Recorder,
    ) -> list[torch.Tensor]:
        """Execute the plan; see `run_step` and `Sends`."""
        try:
            return run_step(
                self,
                list(self.stage_of.values()),
                micro_batches,
                loss_of,
                sends=Sends(most_unsent),
                recorder=recorder,
            )
        finally:
            self.fwd_recv_ops.clear()
            self.bwd_recv_ops.clear()

    def _compute(self, action: _Action, ctx: object) -> None:
        """Run one pass: wait for its inputs, and pass its output to a stage of this rank."""
        index, kind = action.microbatch_index, Kind(action.computation_type.value)
        assert index is not None
        stage = self.stage_of[action.stage_index]
        received = self.fwd_recv_ops if kind == Kind.FORWARD else self.bwd_recv_ops
        if kind != Kind.WEIGHT_GRAD and (stage.stage_index, index) in received:
            works = received.pop((stage.stage_index, index))
            with stage.recorder.wait(Action(stage.stage_index, kind, index)):
                for work in works:
                    work.wait()
        behind = self.stage_of.get(stage.stage_index + 1)
        before = self.stage_of.get(stage.stage_index - 1)
        if kind == Kind.FORWARD:
            made = stage.forward_one_chunk(index, save_forward_output=False)
            if behind is not None:
                behind.set_local_fwd_input(made, index)
            else:
                stage.get_fwd_send_ops(index)
        elif kind == Kind.WEIGHT_GRAD:
            stage.backward_weight_one_chunk(index)
        else:
            stage.backward_one_chunk(index, full_backward=kind == Kind.BACKWARD)
            if before is not None:
                before.set_local_bwd_input(stage.get_local_bwd_output(index), index)
            else:
                stage.get_bwd_send_ops(index)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the channels are open, and shapes come from each batch."""


def torch_schedule(
    schedule: Schedule, stages: Sequence[StagelineStage], num_micro_batches: int
) -> TorchSchedule:
    """Return PyTorch's own class for a schedule."""
    if schedule.written is not None:
        made = _PipelineScheduleRuntime(list(stages), num_micro_batches, scale_grads=False)
        has_transfers = "SEND_" in Path(schedule.name).read_text(encoding="utf-8")
        made._load_csv(schedule.name, "compute_comms" if has_transfers else "compute_only")
        return made
    if schedule.kind.torch_name is None:
        raise UserError(
            f"`schedule` {schedule.name} is not one of PyTorch's, and this engine runs only those. "
            "Use 1f1b, or the default engine."
        )
    kind: Any = get_schedule_class(schedule.kind.torch_name)
    local = list(stages) if schedule.kind.is_multi else stages[0]
    return kind(local, num_micro_batches, scale_grads=False)
