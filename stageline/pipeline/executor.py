"""Carries out a rank's plan: passes in order, transfers beside them, waits only where it must."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stageline import progress
from stageline.pipeline.actions import Action, Kind
from stageline.pipeline.plan import Plan, Transfer
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.stage_contract import check_border
from stageline.pipeline.stage_passes import (
    MicroBatch,
    StagePasses,
    Tensors,
    copy_metas,
    model_inputs,
)

Key = tuple[bool, int, int]  # (is_grad, the stage whose pass it feeds, micro-batch)
MOST_UNSENT = 2  # in forward-only runs: how far a rank may run ahead of a slower one


@dataclass(frozen=True)
class StepInputs:
    """What a plan is carried out on.

    Attributes:
        batches: the micro-batches, wherever they were loaded.
        metas: stage -> micro-batch -> what the stage receives, on the meta device. Of all stages
            here, and of those behind them.
        loss_of: (output of the last stage, micro-batch) -> its loss.
    """

    batches: Sequence[MicroBatch]
    metas: Mapping[int, Sequence[Tensors]]
    loss_of: Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor | tuple[()]]


class Executor:
    """Runs plans over the stages of one rank.

    Args:
        passes: stage -> its passes.
        rank_of_stage: which rank of the pipeline holds each stage.
        group: the pipeline's process group.

    Attributes:
        sent_bytes: what the last run sent to other ranks, forward and back.
    """

    def __init__(
        self,
        passes: Mapping[int, StagePasses],
        *,
        rank_of_stage: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.passes = passes
        self.rank_of_stage = rank_of_stage
        self.device = device
        self.group = group
        self.last = len(rank_of_stage) - 1
        self.sent_bytes = 0
        self._moved: dict[int, tuple[MicroBatch, int]] = {}  # with the passes still to come
        self._coming: dict[Key, tuple[list[dist.Work], Tensors]] = {}
        self._here: dict[Key, Tensors] = {}  # made here, for a pass or a send of this rank
        self._going: deque[tuple[list[dist.Work], Tensors]] = deque()

    def run(
        self,
        plan: Plan,
        inputs: StepInputs,
        *,
        most_unsent: int | None = None,
        recorder: Recorder = NO_RECORDER,
    ) -> list[torch.Tensor]:
        """Carries out `plan`.

        Args:
            most_unsent: wait for the receiver when more sends than these are under way.

        Returns:
            The losses, in the order of the plan; none but on the rank of the last stage.
        """
        self.sent_bytes = 0
        losses: list[torch.Tensor] = []
        for item in plan:
            if isinstance(item, Transfer):
                self._send(item, most_unsent) if item.is_send else self._receive(item, inputs)
            elif item.kind == Kind.FORWARD:
                losses += self._forward(item, inputs, recorder)
            else:
                self._backward(item, recorder)
        self._wait_for_sends(0)
        assert not self._coming and not self._here
        return losses

    def clear(self) -> None:
        """Forgets everything of a step."""
        self._moved.clear()
        self._coming.clear()
        self._here.clear()
        self._going.clear()
        for passes in self.passes.values():
            passes.clear()

    # -- passes ----------------------------------------------------------------------------

    def _forward(
        self, action: Action, inputs: StepInputs, recorder: Recorder
    ) -> list[torch.Tensor]:
        stage, _, index = action
        batch = self._move(index, inputs)
        came = (
            (batch["input_ids"],)
            if stage == 0
            else self._take((False, stage, index), action, recorder)
        )
        is_last = stage == self.last
        with recorder.span(action):
            made = self.passes[stage].forward(
                index,
                came,
                model_inputs(batch),
                loss_of=(lambda output: inputs.loss_of(output, batch)) if is_last else None,
            )
        if is_last:
            return list(made)
        model = self.passes[stage].model
        check_border(model, made, inputs.metas[stage + 1][index], index)
        self._here[False, stage + 1, index] = made
        return []

    def _move(self, index: int, inputs: StepInputs) -> MicroBatch:
        """A micro-batch on the device: from its first pass here to its last, pixels are large."""
        if index not in self._moved:
            moved = {
                name: value.to(self.device, non_blocking=True)
                for name, value in inputs.batches[index].items()
            }
            self._moved[index] = (moved, len(self.passes))
        batch, uses = self._moved.pop(index)
        if uses > 1:
            self._moved[index] = (batch, uses - 1)
        return batch

    def _backward(self, action: Action, recorder: Recorder) -> None:
        stage, kind, index = action
        needs_grads = kind != Kind.WEIGHT_GRAD and stage < self.last
        grads = self._take((True, stage, index), action, recorder) if needs_grads else None
        with recorder.span(action):
            made = self.passes[stage].backward(index, kind, grads)
        if made:
            self._here[True, stage - 1, index] = made

    def _take(self, key: Key, action: Action, recorder: Recorder) -> Tensors:
        """What a pass needs: made here, or waited for."""
        if key in self._here:
            return self._here.pop(key)
        works, tensors = self._coming.pop(key)
        with recorder.wait(action):
            for work in works:
                work.wait()
        return tensors

    # -- transfers -------------------------------------------------------------------------

    def _receive(self, transfer: Transfer, inputs: StepInputs) -> None:
        # a gradient has the shape of what the stage behind received
        owner = transfer.stage + 1 if transfer.is_grad else transfer.stage
        metas = inputs.metas[owner][transfer.micro_batch]
        if transfer.is_grad:  # integers have none; they come behind all else
            metas = tuple(meta for meta in metas if meta.is_floating_point())
        buffers = copy_metas(metas, self.device)
        works = [dist.irecv(b, group=self.group, group_src=transfer.peer) for b in buffers]
        key = (transfer.is_grad, transfer.stage, transfer.micro_batch)
        self._coming[key] = (works, buffers)

    def _send(self, transfer: Transfer, most_unsent: int | None) -> None:
        key = (transfer.is_grad, transfer.stage, transfer.micro_batch)
        tensors = tuple(tensor.detach().contiguous() for tensor in self._here.pop(key))
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        works = [dist.isend(t, group=self.group, group_dst=transfer.peer) for t in tensors]
        self._going.append((works, tensors))
        while self._going and all(work.is_completed() for work in self._going[0][0]):
            self._going.popleft()
        if most_unsent is not None:
            self._wait_for_sends(most_unsent)

    def _wait_for_sends(self, most: int) -> None:
        while len(self._going) > most:
            works, _ = self._going.popleft()
            with progress.doing("receivers", is_waiting=True):
                for work in works:
                    work.wait()
