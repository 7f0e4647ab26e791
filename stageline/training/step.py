"""One optimizer step over the pipeline: schedule, tied weights, norm, clipping, update.

Every rank calls `TrainStep` with the same micro-batches and gets the same result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stageline.errors import UserError
from stageline.pipeline.ownership import Ownership
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.training.grad_norm import clip_gradients, global_grad_norm
from stageline.training.precision import LossScaler, MasterWeights

IGNORE = -100


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks.

    Attributes:
        loss: the loss of the whole batch.
        grad_norm: before clipping; inf or nan when the step was skipped.
        num_tokens: real tokens, padding left out.
        num_targets: supervised tokens.
        num_samples: rows with at least one of them.
        is_skipped: a gradient was not finite, so no weight changed.
        wants_stop: some rank was asked to stop (Ctrl-C).
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int
    num_samples: int
    is_skipped: bool
    wants_stop: bool


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
    ) -> None:
        self.runner = runner
        self.loss_fn = loss_fn
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler or LossScaler(enabled=False)
        trainable = {
            name: parameter
            for name, parameter in runner.local.named_parameters().items()
            if parameter.requires_grad
        }
        self.weights = MasterWeights(trainable)
        self.optimizer = make_optimizer(self.weights.parameters)
        self.ownership = Ownership(
            trainable,
            order=runner.local.parameter_order,
            stage_of=runner.local.stage_of(),
            group=runner.group,
        )
        if not any(self.ownership.names_by_rank):
            raise UserError(
                "every parameter of every stage is frozen, so nothing can be trained: drop a "
                "--frozen-* option or add LoRA (--llm-lora-num 1)."
            )

    def __call__(
        self, micro_batches: Sequence[MicroBatch], *, step: int, wants_stop: bool = False
    ) -> StepResult:
        """Runs step number `step` on the micro-batches of one global batch."""
        num_targets = count_targets(micro_batches)
        rate = self.learning_rate(step)
        self.weights.zero_grad()
        divisor = torch.tensor(float(num_targets), device=self.runner.device)

        def loss_of(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            return self.loss_fn(logits, batch, num_targets=divisor) * self.scaler.scale

        loss = self.runner.step(micro_batches, loss_fn=loss_of) / self.scaler.scale
        grad_norm, is_skipped = self._update(rate)
        loss_value, stop_count = self._share(loss, wants_stop)
        return StepResult(
            loss=loss_value,
            grad_norm=grad_norm,
            learning_rate=rate,
            num_tokens=sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
            num_targets=num_targets,
            num_samples=sum(
                int((batch["labels"] != IGNORE).any(dim=1).sum()) for batch in micro_batches
            ),
            is_skipped=is_skipped,
            wants_stop=stop_count > 0,
        )

    def _update(self, rate: float) -> tuple[float, bool]:
        """Norm, clipping and the optimizer's step; returns the norm and whether it was skipped."""
        parameters = self.weights.parameters
        self.ownership.sum_tied_gradients(parameters)
        self.scaler.unscale(parameters)
        total_norm = global_grad_norm(parameters, ownership=self.ownership)
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

    def _share(self, loss: torch.Tensor, wants_stop: bool) -> tuple[float, float]:
        """Sums over the ranks: the loss is zero on all but the last stage."""
        facts = torch.tensor([0.0, float(wants_stop)], device=self.runner.device)
        facts[0] = loss
        dist.all_reduce(facts, group=self.runner.group)
        return facts[0].item(), facts[1].item()


def count_targets(micro_batches: Sequence[MicroBatch]) -> int:
    """Supervised tokens of a batch; the first token of a row is never predicted.

    Raises:
        UserError: there is none, so the loss is not defined.
    """
    count = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in micro_batches)
    if count == 0:
        raise UserError(
            "a batch has no supervised token, so its loss is not defined: the template must hold "
            "[ANSWER] (or another target) and max_token_num must leave room for it."
        )
    return count
