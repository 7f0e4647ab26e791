"""Runs one optimizer step, or an evaluation, of a stage on a schedule. Knows no optimizer.

Gradient accumulation is more micro-batches in one call: torch's schedules must not be called twice
before an optimizer step.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from stageline.errors import UserError
from stageline.pipeline.ragged_stage import RaggedStage
from stageline.pipeline.schedules import SCHEDULES, check_micro_batches

MicroBatch = dict[str, torch.Tensor]
LossFn = Callable[[torch.Tensor, MicroBatch], torch.Tensor]


class Stage(Protocol):
    """What the runner asks of a stage model."""

    stage: int
    num_stages: int
    is_first: bool
    is_last: bool

    def get_example_input(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]: ...

    def get_example_output(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]: ...


class PipelineRunner:
    """Drives one stage; every rank of the pipeline calls the same methods with the same batch.

    Args:
        model: the stage model of this rank, on `device`.
        group: the pipeline's process group; rank i of it holds stage i.
        schedule: a key of `SCHEDULES`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        schedule: str = "1f1b",
    ) -> None:
        self.model = model
        self.device = device
        self.group = group
        self.schedule_name = schedule
        self.stage = RaggedStage(
            model, stage=model.stage, num_stages=model.num_stages, device=device, group=group
        )
        self._schedules: dict[int, object] = {}
        self._loss_fn: LossFn | None = None
        self._share_facts()

    @property
    def last_stage_rank(self) -> int:
        """The global rank that holds the last stage, where the losses are."""
        peer = self.stage.stage_index_to_group_rank[self.model.num_stages - 1]
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def step(self, micro_batches: Sequence[MicroBatch], *, loss_fn: LossFn) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients add up in `.grad`.

        Args:
            loss_fn: (logits, micro-batch) -> its share of the loss; called on the last stage.

        Returns:
            The summed loss, a scalar in float32; zero on all but the last stage.
        """
        schedule = self._schedule(len(micro_batches))
        self._prepare(micro_batches, has_backward=True)
        self._loss_fn = loss_fn
        moved = [self._to_device(micro_batch) for micro_batch in micro_batches]
        losses: list[torch.Tensor] | None = [] if self.model.is_last else None
        schedule._step_microbatches(
            [(batch["input_ids"],) for batch in moved] if self.model.is_first else None,
            [_inputs(batch) for batch in moved],
            moved if self.model.is_last else None,
            losses,
            return_outputs=False,
        )
        self.stage.clear_runtime_states()
        if not losses:
            return torch.zeros((), device=self.device)
        # one by one, as a loop over micro-batches would add them
        return sum((loss.detach().float() for loss in losses), torch.zeros((), device=self.device))

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        on_output: Callable[[torch.Tensor, MicroBatch], None],
    ) -> None:
        """Forward only, any number of micro-batches; no graph and no output is kept.

        Args:
            on_output: called on the last stage with the logits [B, T, V] of each micro-batch.
        """
        was_training = self.model.training
        self.model.eval()
        self._prepare(micro_batches, has_backward=False)
        sending: list[dist.Work] = []
        for chunk, micro_batch in enumerate(micro_batches):
            batch = self._to_device(micro_batch)
            _wait(_start(self.stage.get_fwd_recv_ops(chunk)))
            args = (batch["input_ids"],) if self.model.is_first else ()
            output = self.stage.forward_one_chunk(
                chunk, args, _inputs(batch), save_forward_output=False
            )
            _wait(sending)
            sending = _start(self.stage.get_fwd_send_ops(chunk))
            if self.model.is_last:
                on_output(output, batch)
            self.stage.fwd_cache.pop(chunk)
        _wait(sending)
        self.model.train(was_training)

    def _schedule(self, num_micro_batches: int) -> object:
        if num_micro_batches not in self._schedules:
            check_micro_batches(
                self.schedule_name,
                num_micro_batches=num_micro_batches,
                num_stages=self.model.num_stages,
            )
            schedule = SCHEDULES[self.schedule_name](
                self.stage,
                num_micro_batches,
                loss_fn=lambda output, batch: self._loss_fn(output, batch),
                # torch would divide once per stage that holds a parameter: tied ones twice
                scale_grads=False,
            )
            # RaggedStage.prepare does the work of torch's metadata inference
            schedule._stage_forward_initialized = True
            schedule._stage_backward_initialized = True
            self._schedules[num_micro_batches] = schedule
        return self._schedules[num_micro_batches]

    def _prepare(self, micro_batches: Sequence[MicroBatch], *, has_backward: bool) -> None:
        shapes = [tuple(batch["input_ids"].shape) for batch in micro_batches]
        self.stage.prepare(
            [self.model.get_example_input(*shape) for shape in shapes],
            [self.model.get_example_output(*shape) for shape in shapes],
            has_backward=has_backward,
        )

    def _to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return {
            name: value.to(self.device, non_blocking=True) for name, value in micro_batch.items()
        }

    def _share_facts(self) -> None:
        """Learns, once, which stages train and whether neighbours agree on their border."""
        probe = (2, 8)
        own = {
            "trains": any(p.requires_grad for p in self.model.parameters()),
            "input": _describe(self.model.get_example_input(*probe)),
            "output": _describe(self.model.get_example_output(*probe)),
        }
        facts: list[dict] = [own] * self.model.num_stages
        if self.model.num_stages > 1:
            gathered: list[dict | None] = [None] * self.model.num_stages
            dist.all_gather_object(gathered, own, group=self.group)
            facts = gathered
        for stage in range(self.model.num_stages - 1):
            if facts[stage]["output"] != facts[stage + 1]["input"]:
                raise UserError(
                    f"stage {stage} sends {facts[stage]['output']}, stage {stage + 1} expects "
                    f"{facts[stage + 1]['input']} for a micro-batch of {probe}: get_example_input "
                    "and get_example_output of the stage model must agree."
                )
        self.stage.sends_grad = any(fact["trains"] for fact in facts[: self.model.stage])
        self.stage.receives_grad = any(fact["trains"] for fact in facts[: self.model.stage + 1])


def _describe(tensors: tuple[torch.Tensor, ...]) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]


def _inputs(batch: MicroBatch) -> MicroBatch:
    """What the model gets; the rest is for the loss alone."""
    return {
        name: value
        for name, value in batch.items()
        if name != "labels" and not name.startswith("loss_")
    }


def _start(ops: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
