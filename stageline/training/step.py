"""One optimizer step over the pipeline: schedule, replicas, tied weights, norm, clipping, update.

Every rank of a pipeline calls `TrainStep` with the same micro-batches; replicas have others. All
get the same result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stageline import progress
from stageline.data.batch import IGNORE
from stageline.data.packing import count_samples
from stageline.errors import UserError
from stageline.pipeline.ownership import Ownership
from stageline.pipeline.recorder import NO_RECORDER
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.agreement import check_agreement
from stageline.training.grad_norm import clip_gradients, global_grad_norm
from stageline.training.precision import LossScaler, MasterWeights
from stageline.training.replicas import Replicas
from stageline.training.step_loss import StepLoss
from stageline.training.step_progress import StepProgress, begin_step
from stageline.training.step_timeline import StepTimeline


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks.

    Attributes:
        loss: of the whole batch, of all replicas; what the loss_fn part says alone, so that it can
            be compared between models.
        grad_norm: before clipping; inf or nan when the step was skipped.
        num_tokens: real tokens, padding left out.
        num_targets: supervised tokens.
        num_samples: samples with at least one of them.
        is_skipped: a gradient was not finite, so no weight changed.
        wants_stop: some rank was asked to stop, by a signal.
        extra_loss: what the model adds by itself, weight included (the router loss of a mixture
            of experts); not in `loss`, but trained on. 0 for models without.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int
    num_samples: int
    is_skipped: bool
    wants_stop: bool
    extra_loss: float = 0.0


class TrainStep:
    """Runs optimizer steps.

    Args:
        runner: the pipeline of this rank's stage.
        make_optimizer: gets this stage's {name: parameter to update}; returns the optimizer, or
            None where nothing trains.
        loss_fn: a loss_fn part.
        learning_rate: step -> rate; the first step is 0.
        max_grad_norm: clip to this norm; 0 does not clip.
        scaler: loss scaling for fp16.
        timeline: times the passes of one of the steps.
        replicas: copies of the pipeline that share each step; None: there is one.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        make_optimizer: Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer | None],
        loss_fn: Callable[..., torch.Tensor],
        learning_rate: Callable[[int], float],
        max_grad_norm: float = 1.0,
        scaler: LossScaler | None = None,
        timeline: StepTimeline | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.runner = runner
        self.loss_fn = loss_fn
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler or LossScaler(enabled=False)
        self.timeline = timeline
        self.replicas = replicas or Replicas()
        for passes in runner.passes.values():
            passes.after_weights = self.replicas.end_weight_pass
        trainable = {
            name: parameter
            for name, parameter in runner.local.named_parameters().items()
            if parameter.requires_grad
        }
        self.weights = MasterWeights(trainable)
        self.optimizer = make_optimizer(self.weights.parameters)
        self.ownership = Ownership(
            trainable, order=runner.local.parameter_order, group=runner.group
        )
        if not any(self.ownership.names_by_rank):
            raise UserError(
                "every parameter of every stage is frozen, so nothing can be trained: drop a "
                "--frozen-* option or add LoRA (--llm-lora-num 1)."
            )

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> StepResult:
        """Runs step number `step` on the micro-batches of one global batch.

        Args:
            stop_requested: asked at the end of the step, so that it is the last one.
        """
        begin_step(step, micro_batches)
        check_agreement(micro_batches, group=self.runner.group)
        num_targets, num_tokens, num_samples = self._count(micro_batches)
        rate = self.learning_rate(step)
        self.weights.zero_grad()
        loss_of = StepLoss(
            self.loss_fn,
            num_targets=num_targets,
            num_micro_batches=len(micro_batches) * self.replicas.size,
            scale=self.scaler.scale,
            device=self.runner.device,
        )
        recorder = NO_RECORDER
        if self.timeline is not None:
            recorder = self.timeline.recorder(step, num_micro_batches=len(micro_batches))
        self.runner.step(micro_batches, loss_fn=loss_of, recorder=StepProgress(recorder))
        with progress.doing("optimizer"):
            grad_norm, is_skipped = self._update(rate)
        loss, extra_loss, stop_count = self._share(
            loss_of.loss, loss_of.extra_loss, wants_stop=stop_requested()
        )
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=num_tokens,
            num_targets=num_targets,
            num_samples=num_samples,
            is_skipped=is_skipped,
            wants_stop=stop_count > 0,
            extra_loss=extra_loss,
        )

    def _count(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Targets, tokens and samples of the whole batch, over all replicas."""
        counts = self.replicas.sum(
            [
                count_targets(micro_batches),
                sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
                sum(count_samples(batch) for batch in micro_batches),
            ]
        )
        if counts[0] == 0:
            raise UserError(
                "a batch has no supervised token, so its loss is not defined: the template must "
                "hold [ANSWER] (or another target) and max_token_num must leave room for it."
            )
        return counts

    def _update(self, rate: float) -> tuple[float, bool]:
        """Norm, clipping and the optimizer's step; returns the norm and whether it was skipped.

        All replicas have the same gradients by then, to the bit, and so decide the same.
        """
        parameters = self.weights.parameters
        self.replicas.reduce_gradients(self.weights)
        self.ownership.sum_tied_gradients(parameters)
        self.scaler.unscale(parameters)
        total_norm = global_grad_norm(
            parameters,
            ownership=self.ownership,
            shares=self.weights.shares,
            replica_group=self.replicas.group,
        )
        norm = total_norm.item()
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            if self.max_grad_norm > 0:
                clip_gradients(parameters, max_norm=self.max_grad_norm, total_norm=total_norm)
            if self.optimizer is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
                self.weights.write_back()
        self.scaler.update(overflowed=is_skipped)
        return norm, is_skipped

    def _share(
        self, loss: torch.Tensor, extra_loss: torch.Tensor, *, wants_stop: bool
    ) -> list[float]:
        """Sums over the ranks: the losses are zero on all but the last stage."""
        stop = torch.tensor(float(wants_stop), device=self.runner.device)
        facts = torch.stack([loss, extra_loss, stop])
        with progress.doing("the other ranks at the end of a step", is_waiting=True):
            dist.all_reduce(facts, group=self.runner.group)
            if self.replicas.size > 1:
                dist.all_reduce(facts, group=self.replicas.group)
            return facts.tolist()


def count_targets(micro_batches: Sequence[MicroBatch]) -> int:
    """Supervised tokens of a batch; the first token of a row is never predicted."""
    return sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in micro_batches)
