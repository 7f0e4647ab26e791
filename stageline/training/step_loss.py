"""The loss of one optimizer step, as the last stage adds it up: tokens and extra loss apart."""

from collections.abc import Callable

import torch

from stageline import chaos, progress
from stageline.pipeline.runner import MicroBatch

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def logits_of(output: Output) -> torch.Tensor:
    """The logits [B, T, V] of a last stage, which may return (logits, extra loss)."""
    return output[0] if isinstance(output, tuple) else output


class StepLoss:
    """Called with the output of each micro-batch; returns what its backward pass starts from.

    An extra loss (of the routers of a mixture of experts) is a figure of one micro-batch, already
    weighted by the model. The step has the mean of them, so that more micro-batches do not make
    it heavier: the token loss is divided by the targets of the whole step, too.

    Args:
        loss_fn: a loss_fn part.
        num_targets: supervised tokens of the whole step.
        num_micro_batches: micro-batches of the whole step, over all replicas.
        scale: of fp16's loss scaling; in no figure.

    Attributes:
        loss: the sum of what `loss_fn` returned, a scalar in float32.
        extra_loss: the mean of the extra losses; 0 for models without.
    """

    def __init__(
        self,
        loss_fn: Callable[..., torch.Tensor],
        *,
        num_targets: int,
        num_micro_batches: int,
        scale: float,
        device: torch.device,
    ) -> None:
        self.loss_fn = loss_fn
        self.num_targets = torch.tensor(float(num_targets), device=device)
        self.num_micro_batches = num_micro_batches
        self.scale = scale
        self.loss = torch.zeros((), device=device)
        self.extra_loss = torch.zeros((), device=device)

    def __call__(self, output: Output, batch: MicroBatch) -> torch.Tensor:
        here = progress.place()
        with progress.doing("loss", stage=here.stage, micro_batch=here.micro_batch):
            chaos.point("loss")
            loss = self.loss_fn(logits_of(output), batch, num_targets=self.num_targets)
        self.loss = self.loss + loss.detach().float()
        if isinstance(output, tuple):
            extra_loss = output[1] / self.num_micro_batches
            self.extra_loss = self.extra_loss + extra_loss.detach().float()
            loss = loss + extra_loss
        return loss * self.scale
