"""The stages of this rank as a check drives them: losses, steps, gradients, what crosses a border.

Every method is called on all ranks at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.checking.batches import MicroBatch
from stageline.checking.compare import StageTensors
from stageline.checking.reference import EPS, LEARNING_RATE, WEIGHT_DECAY
from stageline.pipeline.runner import PipelineRunner
from stageline.training.optimizer_groups import optimizer_groups
from stageline.training.step import StepResult, TrainStep
from stageline.training.step_loss import logits_of


class Split:
    """This rank's stages, trained as `train_pp.py` trains them.

    Args:
        runner: holds the stages.
        loss_fn: a loss_fn part.
    """

    def __init__(self, runner: PipelineRunner, *, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.runner = runner
        self.group = runner.group
        self.models: list[Any] = list(runner.local)
        self.loss_fn = loss_fn
        self.train_step = TrainStep(
            runner,
            make_optimizer=_make_optimizer,
            loss_fn=loss_fn,
            learning_rate=lambda step: LEARNING_RATE,
        )

    def step(self, micro_batches: Sequence[MicroBatch], *, max_norm: float) -> StepResult:
        """One optimizer step; the clipped gradients stay."""
        self.train_step.max_grad_norm = max_norm
        return self.train_step(micro_batches, step=0)

    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of a batch, forward only; the same on all ranks."""
        part = self.train_step.part
        totals = {
            name: torch.tensor(float(count)) for name, count in part.count(micro_batches).items()
        }
        total = torch.zeros(())

        def add(output: Any, batch: MicroBatch) -> None:
            loss, _ = part(logits_of(output), batch, totals=totals, step=0)
            total.add_(loss.float())

        self.runner.evaluate(micro_batches, on_output=add)
        dist.all_reduce(total, group=self.group)
        return total.item()

    def borders(self, batch: MicroBatch) -> StageTensors:
        """The hidden states that each stage sends on, as (stage, name, value)."""
        sent: list[tuple[int, str, torch.Tensor]] = []

        def keep(model: Any, _: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            sent.append((model.stage, border_name(model.stage), value))

        hooks = [model.register_forward_hook(keep) for model in self._senders()]
        self.loss([batch])
        for hook in hooks:
            hook.remove()
        return sent

    def _senders(self) -> list[Any]:
        """Stages that send on the hidden states of layers; those of a tower have none."""
        return [model for model in self.models if model.layers and not model.is_last]

    def gradients(self) -> StageTensors:
        """Of every trained parameter."""
        updated = self.train_step.weights.parameters
        return [
            (model.stage, name, updated[name].grad)
            for model in self.models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def weights(self) -> StageTensors:
        """Every parameter."""
        return [
            (model.stage, name, parameter)
            for model in self.models
            for name, parameter in model.named_parameters()
        ]

    @torch.no_grad()
    def break_one_number(self, stage: int) -> str | None:
        """Changes one number of one matrix of a stage; says which, where that stage lies.

        It moves by as much as the largest number of its matrix, and is the one whose move should
        change the loss of the last step's batch most.
        """
        model = next((model for model in self.models if model.stage == stage), None)
        if model is None:
            return None
        matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
        matrices = matrices or dict(model.named_parameters())
        updated = self.train_step.weights.parameters

        def pull(name: str) -> float:
            grad = updated[name].grad if name in updated else None
            return 0.0 if grad is None else (grad.abs().max() * matrices[name].abs().max()).item()

        name = max(matrices, key=lambda name: (pull(name), matrices[name].numel()))
        parameter = matrices[name]
        grad = updated[name].grad if name in updated else None
        place = 0 if grad is None else int(grad.abs().argmax())
        index = torch.unravel_index(torch.tensor(place), parameter.shape)
        parameter[index] += parameter.abs().max().clamp(min=1e-2)
        return name


def border_name(stage: int) -> str:
    """What the hidden states between a stage and the next one are called."""
    return f"stage {stage} -> {stage + 1}"


def _make_optimizer(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    groups = optimizer_groups(parameters, weight_decay=WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
