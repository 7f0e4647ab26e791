"""Runs one optimizer step's passes, or an evaluation, of a rank's stages. Knows no optimizer.

Gradient accumulation is more micro-batches in one call.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from stageline import progress
from stageline.errors import UserError
from stageline.modules.layer_seeds import LayerSeeds
from stageline.pipeline.plan import (
    Action,
    GradFlow,
    Kind,
    Plan,
    Transfer,
    add_transfers,
    drop_dead_backward,
    forward_orders,
    grad_flow,
)
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.schedules import Schedule, make_schedule
from stageline.pipeline.stage_passes import (
    BorderFacts,
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    check_border,
    check_borders,
    copy_metas,
    describe_borders,
    model_inputs,
)
from stageline.stage import Stage

Key = tuple[bool, int, int]  # (is_grad, the stage whose pass it feeds, micro-batch)
Channels = Mapping[tuple[int, int], dist.ProcessGroup]  # see `process_group.open_channels`
MOST_UNSENT = 2  # in forward-only runs: how far a rank may run ahead of a slower one


@dataclass(frozen=True)
class StepInputs:
    """What a plan is carried out on.

    Attributes:
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
        last: the last stage of the pipeline.
        channels: (from, to) ranks -> what carries that direction; else `group` does.

    Attributes:
        sent_bytes: what the last run sent to other ranks, forward and back.
    """

    def __init__(
        self,
        passes: Mapping[int, StagePasses],
        *,
        last: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        channels: Channels,
    ) -> None:
        self.passes = passes
        self.device = device
        self.group = group
        self.channels = channels
        self.rank = dist.get_rank(group)
        self.last = last
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
        self._moved.clear()
        self._coming.clear()
        self._here.clear()
        self._going.clear()
        for passes in self.passes.values():
            passes.clear()

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

    def _receive(self, transfer: Transfer, inputs: StepInputs) -> None:
        # a gradient has the shape of what the stage behind received
        owner = transfer.stage + 1 if transfer.is_grad else transfer.stage
        metas = inputs.metas[owner][transfer.micro_batch]
        if transfer.is_grad:  # integers have none; they come behind all else
            metas = tuple(meta for meta in metas if meta.is_floating_point())
        buffers = copy_metas(metas, self.device)
        group = self.channels.get((transfer.peer, self.rank), self.group)
        source = self._global(transfer.peer)
        works = [_begun(dist.irecv(buffer, source, group=group)) for buffer in buffers]
        key = (transfer.is_grad, transfer.stage, transfer.micro_batch)
        self._coming[key] = (works, buffers)

    def _send(self, transfer: Transfer, most_unsent: int | None) -> None:
        key = (transfer.is_grad, transfer.stage, transfer.micro_batch)
        tensors = tuple(tensor.detach().contiguous() for tensor in self._here.pop(key))
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        group = self.channels.get((self.rank, transfer.peer), self.group)
        target = self._global(transfer.peer)
        works = [_begun(dist.isend(tensor, target, group=group)) for tensor in tensors]
        self._going.append((works, tensors))
        while self._going and all(work.is_completed() for work in self._going[0][0]):
            self._going.popleft()
        if most_unsent is not None:
            self._wait_for_sends(most_unsent)

    def _global(self, peer: int) -> int:
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def _wait_for_sends(self, most: int) -> None:
        while len(self._going) > most:
            works, _ = self._going.popleft()
            with progress.doing("receivers", is_waiting=True):
                for work in works:
                    work.wait()


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside of the group
    return work


class LocalStages:
    """One or several stage models of a rank, in the order of the model.

    A weight that two of them hold under one name (embedding and head, where first and last stage
    share a rank) becomes one tensor.
    """

    def __init__(self, models: Stage | Sequence[Stage]) -> None:
        self.models: list[Stage] = list(models) if isinstance(models, Sequence) else [models]
        self.num_stages: int = self.models[0].num_stages
        self.parameter_order: list[str] = self.models[0].parameter_order
        _share_equal_names(self.models)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.models)

    @property
    def indices(self) -> list[int]:
        return [model.stage for model in self.models]

    @property
    def training(self) -> bool:
        return self.models[0].training

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name; a shared one once."""
        named: dict[str, nn.Parameter] = {}
        for model in self.models:
            named.update(model.named_parameters())
        return named

    def part_of(self, name: str) -> str | None:
        """The part of the model that a parameter belongs to; None: in no part, or not known."""
        part_of = getattr(self.models[0], "part_of", None)  # by name, so any stage can tell
        return None if part_of is None else part_of(name)

    def train(self, mode: bool = True) -> None:
        for model in self.models:
            model.train(mode)


def _share_equal_names(models: Sequence[nn.Module]) -> None:
    first: dict[str, nn.Parameter] = {}
    for model in models:
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


Output = torch.Tensor | Tensors
LossFn = Callable[[Output, MicroBatch], torch.Tensor]


class PipelineRunner:
    """Drives the stages of one rank; all ranks call the same methods with the same batch.

    Args:
        models: the stage models of this rank, on `device`; one, or several in their order.
        group: the pipeline's process group.
        channels: where transfers of one group come one after the other (NCCL), one for each pair
            of `schedule.pairs`.
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
        self.device = device
        self.group = group
        self.pp_rank = dist.get_rank(group)
        if isinstance(schedule, str):
            stages_per_rank = len(self.local.models) if len(self.local.models) > 1 else None
            num_ranks = dist.get_world_size(group)
            schedule = make_schedule(schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
        self.schedule = schedule
        self._check_placement()
        self.flow = self._learn_flow()
        self.seeds = LayerSeeds(self.local, seed=seed, devices=[device])
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
        pairs = [pair for pair in self.schedule.pairs if self.pp_rank in pair]
        assert device.type == "cpu" or set(pairs) <= set(channels or ()), pairs
        self._executor = Executor(
            self.passes,
            last=self.schedule.num_stages - 1,
            device=device,
            group=group,
            channels=channels or {},
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
                f"rank {self.pp_rank} was given stages {self.local.indices}, `schedule` "
                f"{self.schedule.name} places {expected} there: build those."
            )

    def _learn_flow(self) -> GradFlow:
        """Learns, once, which stages train and whether neighbours agree on their border."""
        own = [describe_borders(model) for model in self.local]
        gathered: list[list[BorderFacts]] = [[]] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, own, group=self.group)
        facts = sorted((fact for facts in gathered for fact in facts), key=lambda f: f.stage)
        check_borders(facts)
        return grad_flow([fact.trains for fact in facts])
