"""One optimizer step over the pipeline: passes, replicas, tied weights, norm, clipping, update.

Every rank of a pipeline calls `TrainStep` with the same micro-batches; replicas have others. All
get the same result.
"""

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline import progress
from stageline.data.batches.batch import count_samples
from stageline.device import is_accelerator, sent
from stageline.distributed.ranks import Ranks
from stageline.errors import DataError, UserError
from stageline.modules.recompute import RandomState
from stageline.modules.router_records import ExpertTokens, summed
from stageline.pipeline.plan import Action, Kind
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.grad_norm import (
    Ownership,
    gather_norms,
    gather_owners,
    stages_without_gradient,
    total_norm,
)
from stageline.training.loss_part import LARGEST, LossPart, StepLoss
from stageline.training.nonfinite import Skips, find_non_finite
from stageline.training.optimizers import set_learning_rate
from stageline.training.precision import LossScaler, MasterWeights
from stageline.training.replicas import Replicas
from stageline.training.timeline import StepTimeline

current_shapes: list[tuple[int, ...]] = []  # [rows, tokens] of each micro-batch of the step
OPERATIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
}


class StepProgress(Recorder):
    """A recorder that notes each pass in `stageline.progress`, for failure reports.

    Args:
        inner: times the passes.
        device: does the passes; a GPU is behind the main thread, so its queue gets marks.
        names: other names for the operations, such as "evaluation" for "forward".
    """

    def __init__(
        self, inner: Recorder = NO_RECORDER, *, device: torch.device, **names: str
    ) -> None:
        super().__init__(device, rank=inner.rank)
        self.inner = inner
        self.mark = functools.partial(recorded_event, device) if is_accelerator(device) else None
        self.names = {kind: names.get(name, name) for kind, name in OPERATIONS.items()}

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        stage, kind, index = action
        name = self.names[kind]
        note = progress.doing(name, stage=stage, micro_batch=index, mark=self.mark)
        with note, self.inner.span(action):
            yield

    @contextmanager
    def wait(self, action: Action) -> Iterator[None]:
        stage, kind, index = action
        what = "activations" if kind == Kind.FORWARD else "gradients"
        with (
            progress.doing(what, stage=stage, micro_batch=index, is_waiting=True, mark=self.mark),
            self.inner.wait(action),
        ):
            yield


def recorded_event(device: torch.device) -> Any:
    """Return a mark in the running stream, after the transfers that it waits for."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def begin_step(step: int, micro_batches: Sequence[MicroBatch] = ()) -> None:
    """Note how many optimizer steps are done, and the shapes of the next one, for reports."""
    progress.at_step(step)
    current_shapes[:] = [tuple(batch["input_ids"].shape) for batch in micro_batches]


# pixels are made on the first stage only
SHARED = ("input_ids", "labels", "loss_kl_input_ids", "loss_kl_labels")


def check_agreement(
    micro_batches: Sequence[Mapping[str, torch.Tensor]], *, group: dist.ProcessGroup | None
) -> None:
    """Compare a hash over the pipeline, before a step sends anything; every rank calls this.

    Each rank loads its micro-batches itself and computes shapes from them. Where they differ, gloo
    fills a buffer in part or ends the process, and different tokens would go unseen.

    Raises:
        DataError: ranks differ; on all of them.
    """
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if num_ranks == 1:
        return
    described = []  # shapes, types and checksums of each micro-batch
    for batch in micro_batches:
        words = []
        for name in (one for one in SHARED if one in batch):
            value = batch[name].cpu().contiguous()
            checksum = zlib.crc32(value.flatten().view(torch.uint8).numpy().data)
            kind = str(value.dtype).removeprefix("torch.")
            words.append(f"{name} {tuple(value.shape)} {kind} (contents {checksum:08x})")
        described.append(" ".join(words))
    # on the CPU where the group can: no wait for an accelerator
    has_gloo = "cpu" in str(dist.get_backend_config(group))
    device = "cpu" if has_gloo else torch.accelerator.current_accelerator()
    own = torch.tensor([zlib.crc32("\n".join(described).encode())], device=device)
    hashes = [torch.empty_like(own) for _ in range(num_ranks)]
    with progress.doing("other ranks at the start of a step", is_waiting=True):
        dist.all_gather(hashes, own, group=group)
        if all(torch.equal(other, own) for other in hashes):
            return
        gathered: list[list[str]] = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, described, group=group)
    first = gathered[0]
    rank, other = next((rank, one) for rank, one in enumerate(gathered) if one != first)
    what = f"{len(first)} and {len(other)} micro-batches of one step"
    if len(first) == len(other):
        index = next(index for index, one in enumerate(first) if one != other[index])
        what = (
            f"different micro-batches {index} of one step: {first[index]} on rank 0, "
            f"{other[index]} on rank {rank}"
        )
    raise DataError(
        f"stage ranks 0 and {rank} of a pipeline made {what}. Make the dataset and the collate "
        "part give the same on every rank: no randomness of their own, no files that differ."
    )


class SharedFigures:
    """Sums of scalars over the ranks of a pipeline and its replicas; every rank calls this.

    Only the last stage knows the names of a loss's figures, when it calls the loss; they are
    exchanged once, and known in one order on all ranks then.

    Args:
        device: of tensors that are sent.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, replicas: Replicas, device: torch.device
    ) -> None:
        self.group, self.replicas, self.device = group, replicas, device
        self.names: list[str] = []

    def sum(
        self,
        facts: Sequence[torch.Tensor],
        figures: Mapping[str, torch.Tensor],
        *,
        local: torch.Tensor,
    ) -> tuple[list[float], dict[str, float], list[float]]:
        """Sum scalars that every rank has, and figures that some have.

        One exchange; two more in a step whose figures are new.

        Args:
            local: numbers on this rank's device that come to the host with the sums, so that the
                host waits for its device once; they are returned too.
        """
        is_new = torch.tensor(float(any(name not in self.names for name in figures)))
        values = [figures.get(name, torch.zeros(())) for name in self.names]
        found = self._sum([*facts, is_new, *values], local)
        found, brought = found[: -len(local)], found[-len(local) :]
        sums = found[len(facts) + 1 :]
        if found[len(facts)] > 0:
            gathered: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(gathered, list(figures), group=self.group)
            told = self.replicas.gather([name for names in gathered for name in names])
            self.names = list(dict.fromkeys([*self.names, *(n for names in told for n in names)]))
            values = [figures.get(name, torch.zeros(())) for name in self.names]
            sums = self._sum(values, local[:0])
        return found[: len(facts)], dict(zip(self.names, sums, strict=True)), brought

    def _sum(self, values: Sequence[torch.Tensor], local: torch.Tensor) -> list[float]:
        own = [value.detach() for value in values]
        if self.device.type != "cpu":  # one copy to the device, without a wait
            of_host = [value for value in own if value.device.type == "cpu"]
            arrived = iter(sent(torch.stack(of_host), self.device).unbind() if of_host else ())
            own = [next(arrived) if value.device.type == "cpu" else value for value in own]
        total = torch.stack([value.to(self.device) for value in own])
        with progress.doing("the other ranks at the end of a step", is_waiting=True):
            dist.all_reduce(total, group=self.group)
            if self.replicas.size > 1:
                dist.all_reduce(total, group=self.replicas.group)
            return torch.cat((total, local)).tolist()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one optimizer step; equal on all ranks.

    Attributes:
        loss: of the whole batch, of all replicas; only what the loss_fn part returned, so that it
            can be compared between models.
        problem, rows: why the step was skipped, or is odd, and its dataset rows, of all replicas.
        skipped_in_a_row, num_skipped: steps up to this one, and since the start of the run.
        figures: named figures that the loss_fn part returned besides its loss.
        answers: figures of the answers that a step was trained on, where the model gave them.
    """

    loss: float
    grad_norm: float  # before clipping; may be inf or nan when the step was skipped
    learning_rate: float
    num_tokens: int  # without padding; `num_targets`: supervised ones; `num_samples`: with a target
    num_targets: int
    num_samples: int
    is_skipped: bool = False  # the loss or a gradient was not finite, or a spike; no weight changed
    wants_stop: bool = False  # some rank was asked to stop, by a signal
    extra_loss: float = 0.0  # the model's own (router) loss, weighted; trained on, not in `loss`
    problem: str | None = None
    rows: tuple[int, ...] = ()
    skipped_in_a_row: int = 0
    num_skipped: int = 0
    warnings: tuple[str, ...] = ()  # problems that do not stop a run
    figures: dict[str, float] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)
    data_wait: float = 0.0  # seconds of waiting for micro-batches, on the slowest rank


class TrainStep:
    """Runs optimizer steps.

    Args:
        make_optimizer: gets this stage's {name: parameter to update}; returns the optimizer, or
            None where nothing trains.
        learning_rate: step -> rate; the first step is 0.
        max_grad_norm: clip to this norm; 0 does not clip.
        timeline: times the passes of some steps.
        replicas: copies of the pipeline that share each step; None: there is one.
        skips: decides which steps change no weight, and counts them.
        prepare: adds to the micro-batches what the loss needs besides, on all ranks.
        make_weights: gets the trainable parameters; makes what the optimizer updates.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer | None],
        loss_fn: Callable[..., Any],
        learning_rate: Callable[[int], float],
        max_grad_norm: float = 1.0,
        scaler: LossScaler | None = None,
        timeline: StepTimeline | None = None,
        replicas: Replicas | None = None,
        skips: Skips | None = None,
        prepare: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]] = list,
        make_weights: Callable[[dict[str, nn.Parameter]], MasterWeights] = MasterWeights,
    ) -> None:
        self.runner, self.prepare = runner, prepare
        self.loss_fn, self.part = loss_fn, LossPart.of(loss_fn)
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.scaler = scaler or LossScaler(enabled=False)
        self.timeline, self.replicas, self.skips = (
            timeline,
            replicas or Replicas(),
            skips or Skips(),
        )
        self.shared_figures = SharedFigures(
            runner.group, replicas=self.replicas, device=runner.device
        )
        self.expert_tokens = ExpertTokens(runner.local.models)
        self._has_experts = True
        for passes in runner.passes.values():
            passes.after_weights = self.replicas.end_weight_pass
        named = runner.local.named_parameters().items()
        trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.weights = make_weights(trainable)
        self.optimizer = make_optimizer(self.weights.parameters)
        self.ownership = Ownership(
            trainable, order=runner.local.parameter_order, group=runner.group
        )
        if not any(self.ownership.names_by_rank):
            raise UserError(
                "every parameter of every stage is frozen. Drop one of `frozen_vit`, `frozen_llm` "
                "and the like, or add LoRA (`llm_lora_num` 1)."
            )
        stage_of: dict[str, int] = {}
        for model in runner.local.models:  # a shared weight belongs to the first
            for name, _ in model.named_parameters():
                stage_of.setdefault(name, model.stage)
        self.owners = gather_owners(self.ownership, stage_of)
        self._stages_told: set[int] = set()

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        stop_requested: Callable[[], bool] = lambda: False,
        data_wait: float = 0.0,
    ) -> StepResult:
        """Run step number `step` on the micro-batches of one global batch.

        Args:
            stop_requested: asked at the end of the step, so that it is the last one.
            data_wait: seconds that this rank waited for the micro-batches.
        """
        begin_step(step, micro_batches)
        check_agreement(micro_batches, group=self.runner.group)
        with progress.doing("the other ranks at the start of a step", is_waiting=True):
            # over all replicas
            own = self.part.count(micro_batches)
            *totals, num_tokens, num_samples = self.replicas.sum(
                [
                    *own.values(),
                    sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
                    sum(count_samples(batch) for batch in micro_batches),
                ]
            )
        counts = dict(zip(own, totals, strict=True))
        if counts["num_targets"] == 0:
            raise UserError(
                "a batch has no supervised token. Give the template [ANSWER] (or another target), "
                "and room for it in max_token_num."
            )
        rate = self.learning_rate(step)

        # Passes: gradients of this rank
        random_state = RandomState(self.runner.device)
        passes = functools.partial(self.run_passes, self.prepare(micro_batches), counts, step=step)
        loss_of = passes()

        # Reduce: gradients of all replicas, equal on them to the bit; tied weights; the norms
        parameters = self.weights.parameters
        with progress.doing("gradients of the other ranks", is_waiting=True):
            self.replicas.reduce_gradients(self.weights)
            self.ownership.sum_tied_gradients(parameters)
            self.scaler.unscale(parameters)
            norms = gather_norms(
                parameters,
                ownership=self.ownership,
                device=self.shared_figures.device,
                shares=self.weights.shares,
                replica_group=self.replicas.group,
            )
            norm = total_norm(norms)
        # a place for each rank of all replicas, so that the sum holds the number of each
        num_ranks = self.runner.schedule.num_ranks
        waits = torch.zeros(num_ranks * self.replicas.size)
        waits[self.replicas.rank * num_ranks + self.runner.pp_rank] = data_wait
        stop = torch.tensor(float(stop_requested()))
        facts = [loss_of.loss, loss_of.extra_loss, stop, norm * 0, *waits]
        # a sum over replicas that each have a name of their own for the largest value
        own_name = {n: f"{n}/{self.replicas.rank}" for n in loss_of.figures if n.endswith(LARGEST)}
        found = {own_name.get(name, name): value for name, value in loss_of.figures.items()}
        (loss, extra_loss, stop_count, no_number, *all_waits), figures, (grad_norm, *each_norm) = (
            self.shared_figures.sum(facts, found, local=torch.cat((norm[None], norms)))
        )
        for name in [one for one in figures if LARGEST + "/" in one]:
            total = name.rpartition("/")[0]
            figures[total] = max(figures.pop(name), figures.get(total, -math.inf))
        if math.isfinite(grad_norm):
            grad_norm += no_number  # finite on every rank, or on none

        # Decide, the same on all ranks; find the place of a problem
        verdict = self.skips.judge(loss, extra_loss, grad_norm)
        where, rows, warnings = "", tuple[int, ...](), tuple[str, ...]()
        if verdict.problem is not None:
            # an overflow of scaled gradients is not a fault, and sharded weights are released
            can_repeat = not (verdict.is_finite or self.scaler.enabled or self.weights.shares)
            with random_state.replayed():
                where, rows = find_non_finite(
                    self.runner,
                    micro_batches,
                    verdict.problem,
                    losses=loss_of.each,
                    norms=each_norm,
                    owners=self.owners,
                    run_again=passes if can_repeat else None,
                    gradients=parameters,
                    replicas=self.replicas,
                )

        # Clip and update
        if verdict.is_skipped:
            self.weights.zero_grad()
        else:
            if len(self._stages_told) < self.runner.schedule.num_stages:  # each stage once
                stages = set(stages_without_gradient(each_norm, self.owners)) - self._stages_told
                self._stages_told |= stages
                warnings = tuple(
                    f"all gradients of stage {stage} are zero, so it learns nothing: look for "
                    "frozen or disconnected parts, or a loss that does not depend on it"
                    for stage in sorted(stages)
                )
            with progress.doing("optimizer"):
                if self.max_grad_norm > 0:
                    nn.utils.clip_grads_with_norm_(parameters.values(), self.max_grad_norm, norm)
                if self.optimizer is not None:
                    set_learning_rate(self.optimizer.param_groups, rate)
                    self.weights.update(self.optimizer.step)
        self.scaler.update(overflowed=not verdict.is_finite)
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=num_tokens,
            num_targets=counts["num_targets"],
            num_samples=num_samples,
            is_skipped=verdict.is_skipped,
            wants_stop=stop_count > 0,
            extra_loss=extra_loss,
            problem=where or None,
            rows=rows,
            skipped_in_a_row=self.skips.in_a_row,
            num_skipped=self.skips.total,
            warnings=warnings,
            figures=figures,
            data_wait=max(all_waits),
        )

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        counts: Mapping[str, int],
        recorder: Recorder | None = None,
        *,
        step: int,
    ) -> StepLoss:
        """Run forward and backward of all micro-batches, starting from gradients of zero."""
        self.weights.zero_grad()
        self.expert_tokens.sums.clear()
        loss_of = StepLoss(
            self.loss_fn,
            num_targets=counts["num_targets"],
            counts=counts,
            step=step,
            num_micro_batches=len(micro_batches) * self.replicas.size,
            scale=self.scaler.scale,
            device=self.runner.device,
        )
        if recorder is None:
            recorder = NO_RECORDER
            if self.timeline is not None:
                recorder = self.timeline.recorder(step, num_micro_batches=len(micro_batches))
        self.runner.seeds.begin(step, first_micro_batch=self.replicas.rank * len(micro_batches))
        told = StepProgress(recorder, device=self.runner.device)
        self.runner.step(micro_batches, loss_fn=loss_of, recorder=told)
        return loss_of

    def read_expert_tokens(self) -> dict[str, list[int]]:
        """Return the tokens of each expert in the last step, over all ranks, by layer.

        Every rank calls this; without experts nothing is exchanged after the first call.
        """
        if not self._has_experts:
            return {}
        own = Ranks.of(self.runner.group).gather([*self.expert_tokens.read().items()])
        told = self.replicas.gather([one for some in own for one in some])
        found = summed(one for some in told for one in some)
        self._has_experts = bool(found)
        in_order = sorted(found, key=lambda name: re.sub(r"\d+", lambda m: m[0].zfill(6), name))
        return {name: found[name].tolist() for name in in_order}

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on, besides weights and optimizer."""
        return {"skips": self.skips.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skips.load_state_dict(state["skips"])
        self.scaler.load_state_dict(state["scaler"])
