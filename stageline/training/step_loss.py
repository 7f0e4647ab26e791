"""The loss of one optimizer step, as the last stage adds it up: tokens and extra loss apart."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stageline import chaos, progress
from stageline.pipeline.runner import MicroBatch
from stageline.training.loss_part import Figures, LossPart

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
        counts: what else the part counts, of the whole step; 1 each where nothing is given.
        step: number of the optimizer step, from 0.
        num_micro_batches: micro-batches of the whole step, over all replicas.
        scale: of fp16's loss scaling; in no figure.

    Attributes:
        loss: the sum of what `loss_fn` returned, a scalar in float32.
        figures: the sums of the named figures that it returned, in float32.
        extra_loss: the mean of the extra losses; 0 for models without.
        each: the loss of every micro-batch in the order of the calls, extra loss included.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        *,
        num_targets: int,
        counts: Mapping[str, int] | None = None,
        step: int = 0,
        num_micro_batches: int,
        scale: float,
        device: torch.device,
    ) -> None:
        self.part = LossPart(loss_fn)
        given = {**dict.fromkeys(self.part.counts, 1), **(counts or {}), "num_targets": num_targets}
        self.totals = {
            name: torch.tensor(float(count), device=device) for name, count in given.items()
        }
        self.step = step
        self.num_micro_batches = num_micro_batches
        self.scale = scale
        self.loss = torch.zeros((), device=device)
        self.extra_loss = torch.zeros((), device=device)
        self.figures: Figures = {}
        self.each: list[torch.Tensor] = []

    def __call__(self, output: Output, batch: MicroBatch) -> torch.Tensor:
        here = progress.place()
        with progress.doing("loss", stage=here.stage, micro_batch=here.micro_batch):
            is_nan = chaos.point("loss")
            loss, figures = self.part(logits_of(output), batch, totals=self.totals, step=self.step)
        if is_nan:
            loss = loss * math.nan
        if chaos.point("spike"):
            loss = loss * 100
        self.loss = self.loss + loss.detach().float()
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0) + value.float()
        if isinstance(output, tuple):
            extra_loss = output[1] / self.num_micro_batches
            self.extra_loss = self.extra_loss + extra_loss.detach().float()
            loss = loss + extra_loss
        self.each.append(loss.detach())
        return loss * self.scale
