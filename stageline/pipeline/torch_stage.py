"""A stage model as a `PipelineStage` that every schedule of `torch.distributed.pipelining` can run.

A plain `PipelineStage` has one static shape for all micro-batches, or infers it by messages and an
extra forward pass. Here each rank computes the shapes from its batch, so that every micro-batch has
its own length, without a message and without an extra pass.
"""

import inspect
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from stageline import progress
from stageline.errors import UserError
from stageline.modules.layer_seeds import NO_SEEDS, LayerSeeds
from stageline.pipeline.plan import Action, GradFlow, Kind, grad_flow
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.stage_passes import (
    PROBE,
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    check_border,
    model_inputs,
    trains,
)
from stageline.stage import Stage

Channels = Mapping[tuple[int, int], dist.ProcessGroup]  # see `process_group.open_channels`


class DeviceBatches:
    """Micro-batches, on the device from their first pass here to the last: pixels are large."""

    def __init__(
        self, batches: Sequence[MicroBatch], device: torch.device, num_passes: int = 1
    ) -> None:
        self.batches, self._device, self._num_passes = batches, device, num_passes
        self._moved: dict[int, tuple[MicroBatch, int]] = {}

    def take(self, index: int) -> MicroBatch:
        """Micro-batch `index` for one forward pass."""
        if index not in self._moved:
            moved = {
                name: value.to(self._device, non_blocking=True)
                for name, value in self.batches[index].items()
            }
            self._moved[index] = (moved, self._num_passes)
        batch, uses = self._moved.pop(index)
        if uses > 1:
            self._moved[index] = (batch, uses - 1)
        return batch


class Sends:
    """Sends that are under way; each tensor is freed when it has arrived.

    PyTorch keeps it until the end of the step, from torch 2.15 on until its backward pass.

    Args:
        most_unsent: wait for the receiver when more than these are under way; None: never.
    """

    def __init__(self, most_unsent: int | None) -> None:
        self.most_unsent = most_unsent
        self._going: deque[tuple[list[dist.Work], Tensors]] = deque()

    def start(self, ops: Sequence[dist.P2POp]) -> None:
        """Start sends and free tensors that have arrived."""
        works: Any = [dist.isend(op.tensor, op.peer, group=op.group) for op in ops]
        self._going.append((works, tuple(op.tensor for op in ops)))
        while self._going and all(work.is_completed() for work in self._going[0][0]):
            self._going.popleft()
        if self.most_unsent is not None:
            self.wait(self.most_unsent)

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` sends are under way."""
        while len(self._going) > most:
            works, _ = self._going.popleft()
            with progress.doing("receivers", is_waiting=True):
                for work in works:
                    work.wait()


class StagelineStage(PipelineStage):
    """A `PipelineStage` around a stage model, for every schedule of PyTorch.

    `step_micro_batches` gives a schedule and its stages the micro-batches of a step. A stage before
    the first trainable parameter has no backward pass, whatever the schedule says, and the first
    stage that trains runs its backward pass in one piece: torch 2.13 omits gradients of frozen
    stages under zero-bubble schedules.

    Args:
        flow: of all stages of the pipeline; None: each has a backward pass.
        saving: entered around each forward pass that keeps a graph.
        channels: (from, to) ranks -> what carries that direction where `sends` starts them. A
            schedule of PyTorch batches sends with receives, which must share `group`.

    Attributes:
        sent_bytes: what the stage sent to other ranks in the step, forward and back.
        sends: starts sends at once; None: the schedule does.
        loss_of: (output, micro-batch) -> loss, on the last stage.
    """

    submod: Stage

    def __init__(
        self,
        model: Stage,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        flow: GradFlow | None = None,
        saving: Callable[[], AbstractContextManager] = nullcontext,
        seeds: LayerSeeds = NO_SEEDS,
        channels: Channels | None = None,
    ) -> None:
        takes = model.get_example_input(*PROBE)
        super().__init__(
            model,
            model.stage,
            model.num_stages,
            device,
            input_args=tuple(takes),
            output_args=tuple(model.get_example_output(*PROBE)) or tuple(takes),
            group=group,
        )
        self.flow = flow or grad_flow([True] * model.num_stages)
        self.passes = StagePasses(
            model,
            computes_grad=self.flow.computes[model.stage],
            sends_grad=self.flow.sends[model.stage],
            saving=saving,
            seeds=seeds,
        )
        self.channels = channels or {}
        self.micro_batches = DeviceBatches((), device)
        self.recorder: Recorder = NO_RECORDER
        self.sent_bytes = 0
        self.sends: Sends | None = None
        self.loss_of: Callable[[Any, MicroBatch], Any] | None = None
        self.losses: list[torch.Tensor] = []
        self._came: dict[int, Tensors] = {}  # inputs of forward passes
        self._made: dict[int, Tensors] = {}  # outputs that will be sent
        self._gives: dict[int, Tensors] = {}  # their shapes, on meta, for the gradients
        self._grads_came: dict[int, Tensors] = {}
        self._grads_made: dict[int, Tensors] = {}
        self._put_off: dict[int, Tensors | None] = {}  # gradients of passes in one piece

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        metas = batch_input(self.submod, self.micro_batches.batches[fwd_chunk_id])
        self._came[fwd_chunk_id] = buffers = self._empty(metas)
        return self._ops(dist.irecv, buffers, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.flow.sends[self.stage_index + 1]:
            return []
        # a gradient has the shape of what the stage behind received; integers have none
        metas = [meta for meta in self._gives.pop(bwd_chunk_id) if meta.is_floating_point()]
        self._grads_came[bwd_chunk_id] = buffers = self._empty(metas)
        return self._ops(dist.irecv, buffers, self.stage_index + 1)

    def _empty(self, metas: Sequence[torch.Tensor]) -> Tensors:
        return tuple(torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in metas)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(self._made.pop(fwd_chunk_id, ()), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(self._grads_made.pop(bwd_chunk_id, ()), self.stage_index - 1)

    def _send(self, tensors: Tensors, stage: int) -> list[dist.P2POp]:
        tensors = tuple(tensor.detach().contiguous() for tensor in tensors)
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        ops = self._ops(dist.isend, tensors, stage)
        if self.sends is None or not ops:
            return ops
        self.sends.start(ops)
        return []

    def _ops(self, op: Callable, tensors: Tensors, stage: int) -> list[dist.P2POp]:
        if not tensors:
            return []
        peer = self.stage_index_to_group_rank[stage]
        way = (self.group_rank, peer) if op is dist.isend else (peer, self.group_rank)
        there = peer if self.group is None else dist.get_global_rank(self.group, peer)
        group = self.group if self.sends is None else self.channels.get(way, self.group)
        return [dist.P2POp(op, tensor, there, group) for tensor in tensors]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Omit messages to this rank: torch 2.11 sends them on V schedules, which gloo refuses."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Nothing: what was sent is not kept here."""

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._came[mb_index] = prev_stage_outputs

    def get_local_bwd_output(self, mb_index: int) -> Tensors:
        return self._grads_made.pop(mb_index, ())

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        self._grads_came[mb_index] = next_stage_bwd_outputs  # type: ignore[assignment]

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Return the tensors for the next stage, detached; on the last stage the loss."""
        index, model = fwd_chunk_id, self.submod
        batch = self.micro_batches.take(index)
        came = (batch["input_ids"],) if self.is_first else self._came.pop(index)
        loss_fn = self.loss_of
        assert loss_fn is not None  # `run_step` set it
        loss_of = (lambda output: loss_fn(output, batch)) if self.is_last else None
        with self.recorder.span(Action(self.stage_index, Kind.FORWARD, index)):
            made = self.passes.forward(index, came, model_inputs(batch), loss_of=loss_of)
        if self.is_last:
            self.losses += made
            return made
        self._gives[index] = batch_output(model, self.micro_batches.batches[index])
        check_border(model, made, self._gives[index], index)
        if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self._made[index] = made
        return made

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._backward(bwd_chunk_id, Kind.BACKWARD if full_backward else Kind.INPUT_GRAD)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._backward(bwd_chunk_id, Kind.WEIGHT_GRAD)

    def _backward(self, index: int, kind: Kind) -> None:
        if not self.passes.computes_grad:
            return
        grads = None
        if kind != Kind.WEIGHT_GRAD and not self.is_last:
            grads = self._grads_came.pop(index)
        if not self.passes.sends_grad and kind == Kind.INPUT_GRAD:
            self._put_off[index] = grads  # no stage waits: in one piece, with weights
            return
        if index in self._put_off:
            kind, grads = Kind.BACKWARD, self._put_off.pop(index)
        with self.recorder.span(Action(self.stage_index, kind, index)):
            made = self.passes.backward(index, kind, grads)
        if made:
            self._grads_made[index] = made

    def clear_runtime_states(self) -> None:
        """Drop the state of a step, also of one that failed."""
        super().clear_runtime_states()
        self.passes.clear()
        for kept in (self._came, self._made, self._gives, self._grads_came, self._grads_made):
            kept.clear()
        self._put_off.clear()
        self.losses = []

    @classmethod
    def of(
        cls,
        models: Sequence[Stage],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> list[Self]:
        """Build the stages of this rank; the ranks exchange once which train and what they send."""
        own = []
        for model in models:
            ends = model.get_example_input(*PROBE), model.get_example_output(*PROBE)
            shapes = [str([(tuple(one.shape), one.dtype) for one in end]) for end in ends]
            own.append((model.stage, trains(model), *shapes))
        gathered: list[list[tuple[int, bool, str, str]]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        stages = sorted(one for some in gathered for one in some)
        for (before, _, _, sent), (behind, _, taken, _) in itertools.pairwise(stages):
            if sent != taken:
                raise UserError(
                    f"stage {before} sends {sent}, and stage {behind} expects {taken} for a "
                    f"micro-batch of {PROBE}. Correct get_example_input of the stage model."
                )
        flow = grad_flow([does for _, does, _, _ in stages])
        return [cls(model, device, group, flow=flow, **kwargs) for model in models]


TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


def step_micro_batches(
    schedule: TorchSchedule,
    stages: Sequence[StagelineStage],
    micro_batches: Sequence[MicroBatch],
    *,
    losses: list[torch.Tensor] | None = None,
) -> None:
    """Run one step of a schedule of torch on micro-batches, of which each has its own length.

    Args:
        micro_batches: as many as the schedule was made for, on each rank the same. The schedule's
            loss_fn is called with the output of the last stage and the micro-batch.
        losses: filled on the rank of the last stage, as by `schedule.step`.
    """
    loss_of, has_backward = schedule._loss_fn, schedule._has_backward
    assert loss_of is not None, "a schedule without loss_fn trains nothing"
    # the last stage makes the loss, where dropout and failures know its place
    schedule._loss_fn, schedule._has_backward = None, False
    try:
        made = run_step(schedule, stages, micro_batches, loss_of)
    finally:
        schedule._loss_fn, schedule._has_backward = loss_of, has_backward
    if losses is not None:
        losses[:] = made


def run_step(
    schedule: TorchSchedule,
    stages: Sequence[StagelineStage],
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[Any, MicroBatch], Any],
    *,
    sends: Sends | None = None,
    recorder: Recorder = NO_RECORDER,
) -> list[torch.Tensor]:
    """Run a schedule whose last stage makes the loss by itself.

    Returns:
        The losses, in the order of the passes; none but on the rank of the last stage.
    """
    batches = DeviceBatches(micro_batches, stages[0].device, len(stages))
    for stage in stages:
        stage.clear_runtime_states()
        stage.micro_batches, stage.recorder, stage.loss_of = batches, recorder, loss_of
        stage.sends, stage.sent_bytes = sends, 0
    args: list = [()] * len(micro_batches)  # the stages have their micro-batches
    # PyTorch logs the schedule before an error, and the first line must name the cause
    _LOG.addFilter(_is_no_error)
    try:
        if _TAKES_MICRO_BATCHES:
            schedule.step(arg_mbs=args, return_outputs=False)
        else:
            for stage in stages:
                stage.has_backward = True
            schedule._step_microbatches(args, return_outputs=False)
        if sends is not None:
            sends.wait()
        return [loss for stage in stages for loss in stage.losses]
    finally:
        _LOG.removeFilter(_is_no_error)
        for stage in stages:
            stage.clear_runtime_states()


_LOG = logging.getLogger(schedules.__name__)
# before torch 2.15 a schedule cuts a batch into micro-batches itself
_TAKES_MICRO_BATCHES = "arg_mbs" in inspect.signature(PipelineScheduleMulti.step).parameters


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
