"""One process that trains the whole model in plain PyTorch: what a split is compared with.

Micro-batches one by one, torch's own clipping, AdamW. Uses nothing of the pipeline, and nothing of
how stages are cut; a LoRA is added by a few lines of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from stageline.data.batches.batch import IGNORE
from stageline.errors import PlanError
from stageline.modules.lora import lora_stacks
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.training.loss_part import LossPart, Output, logits_of
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import StepResult, TrainStep
from stageline.verify.compare import StageTensors

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
# large: Adam divides by the gradient, so that of one near zero a rounding would become a step;
# of a tied embedding of 136 M numbers, 1e-6 left weights 3e-6 apart
EPS = 1e-4


class PlainLoRA(nn.Module):
    """A linear layer and a low-rank one beside it, under the names that stages have."""

    def __init__(
        self, module: nn.Module, *, down: torch.Tensor, up: torch.Tensor, scale: float
    ) -> None:
        super().__init__()
        self.lora_module: Any = module
        self.lora: Any = nn.Module()
        for leaf, value in (("lora_A", down), ("lora_B", up)):
            layer = nn.Module()
            layer.weight = nn.Parameter(value.detach().clone())
            self.lora.add_module(leaf, layer)
        self.scale = scale

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight: model code reads its dtype."""
        return self.lora_module.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.lora_module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the layer first: autograd adds up gradients of x in this order
        result = self.lora_module(x)
        low = functional.linear(x, self.lora.lora_A.weight)
        return result + functional.linear(low, self.lora.lora_B.weight) * self.scale


def add_plain_lora(whole: nn.Module, like: nn.Module) -> None:
    """Puts adapters on `whole` where `like`, the part on one stage, has them; the same values."""
    for name, wrappers in lora_stacks(like).items():
        module = whole.get_submodule(name)
        for wrapper in wrappers:
            layer = wrapper.lora
            module = PlainLoRA(
                module, down=layer.lora_A.weight, up=layer.lora_B.weight, scale=layer.scale
            )
        whole.set_submodule(name, module)


def train_same_parameters(whole: nn.Module, like: nn.Module) -> None:
    """Freezes in `whole` what is frozen in `like`."""
    trains = {name: parameter.requires_grad for name, parameter in like.named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trains.get(name, True))


class WholeModelRun:
    """A whole model and its optimizer.

    Args:
        forward: (model, micro-batch without labels) -> logits, or (logits, extra loss).
        loss_fn: a loss_fn part.
        order: names in the order that the norm is summed in; others follow. None: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        forward: Callable[[nn.Module, MicroBatch], Output],
        loss_fn: Callable[..., torch.Tensor],
        order: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.forward = forward
        self.part = LossPart.of(loss_fn)
        place = {name: index for index, name in enumerate(order or ())}
        trained = [item for item in model.named_parameters() if item[1].requires_grad]
        self.trained = dict(sorted(trained, key=lambda item: place.get(item[0], len(place))))
        groups = [
            {"params": chosen, "weight_decay": decay}
            for decay, chosen in (
                (WEIGHT_DECAY, [p for n, p in self.trained.items() if _decays(n, p)]),
                (0.0, [p for n, p in self.trained.items() if not _decays(n, p)]),
            )
            if chosen
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS) if groups else None

    def step(
        self, micro_batches: Sequence[MicroBatch], *, max_norm: float | None
    ) -> tuple[float, float, float]:
        """One optimizer step; the clipped gradients stay.

        Args:
            max_norm: None clips to half of the norm there is.

        Returns:
            Loss, norm before clipping, and what it was clipped to.
        """
        for parameter in self.trained.values():
            parameter.grad = None
        totals = self._totals(micro_batches)
        loss = torch.zeros(())
        for batch in micro_batches:
            share, extra = self._losses(batch, totals)
            total = share + extra / len(micro_batches)
            if total.requires_grad:
                total.backward()
            loss = loss + share.detach().float()
        norms = list(self.trained.values())
        total = nn.utils.get_total_norm([p.grad for p in norms if p.grad is not None])
        max_norm = 0.5 * total.item() if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(norms, max_norm).item()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.item(), norm, max_norm

    @torch.no_grad()
    def loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of a batch, forward only, in the mode that the model is in."""
        totals = self._totals(micro_batches)
        shares = [self._losses(batch, totals)[0].float() for batch in micro_batches]
        return sum(shares, torch.zeros(())).item()

    def _losses(
        self, batch: MicroBatch, totals: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The loss_fn part's share of a micro-batch, and what the model adds by itself."""
        output = self.forward(self.model, model_inputs(batch))
        loss, _ = self.part(logits_of(output), batch, totals=totals, step=0)
        return loss, output[1] if isinstance(output, tuple) else 0.0

    def _totals(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """What the loss counts; a target is counted here, not by what is checked."""
        counts = self.part.count(micro_batches)
        totals = {name: torch.tensor(float(count)) for name, count in counts.items()}
        return {**totals, "num_targets": _count(micro_batches)}

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Name -> gradient of every parameter, None where there is none."""
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Name -> value of every parameter."""
        return dict(self.model.named_parameters())


def run_library_model(model: nn.Module, inputs: MicroBatch) -> Output:
    """Logits of a model of transformers, and its weighted router loss where it has one."""
    outputs = model(**inputs, use_cache=False)
    router_loss = getattr(outputs, "aux_loss", None)
    if router_loss is None:
        return outputs.logits
    return outputs.logits, router_loss * model.router_aux_loss_coef


def run_stage_model(model: nn.Module, inputs: MicroBatch) -> Output:
    """Output of a stage model that is the whole one; token ids also come first, as in a stage."""
    return model(inputs["input_ids"], **inputs)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")


def _count(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Supervised tokens; the first one of a row has none before it that could predict it."""
    count = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in micro_batches)
    return torch.tensor(float(count))


class Split:
    """This rank's stages, trained as `train_pp.py` trains them; all ranks call a method together.

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


def on_hidden_states(layer: nn.Module, keep: Callable[[torch.Tensor], object]) -> RemovableHandle:
    """Hands the hidden states that a layer gets to `keep`, until the hook is removed."""

    def look(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if isinstance(value, torch.Tensor):
            keep(value.detach().clone())

    return layer.register_forward_pre_hook(look, with_kwargs=True)


def layers_behind_borders(whole: nn.Module, stage: Any) -> dict[int, nn.Module] | None:
    """Number of a border -> the layer of the whole model that comes first behind it.

    Behind a stage of a tower there is another thing. None: a model that does not name its layers.

    Args:
        stage: any stage of the split.
    """
    places = itertools.accumulate(stage.partition[:-1])
    try:
        return {
            border: whole.get_submodule(stage.layer_name(index))
            for border, index in enumerate(places)
            if index > 0
        }
    except (PlanError, AttributeError):
        return None


def border_name(stage: int) -> str:
    """What the hidden states between a stage and the next one are called."""
    return f"stage {stage} -> {stage + 1}"


def _make_optimizer(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer | None:
    if not parameters:
        return None
    groups = optimizer_groups(parameters, weight_decay=WEIGHT_DECAY)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
