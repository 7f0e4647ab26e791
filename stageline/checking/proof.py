"""Proves on a cut-down copy of a model that its stages compute what the whole model computes.

Loss and every gradient, in one process, in float64 where the model's operators know it. The copy
has the user's own multipliers, flags and kinds of layers, see shrink.py; its weights are random.
Where the first difference is, and what usually makes it, is part of the result.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from stageline.checking.batches import Tensors, run_chain
from stageline.checking.reference import run_library_model, run_stage_model
from stageline.data.batches.batch import IGNORE
from stageline.errors import PlanError
from stageline.pipeline.stage_passes import MicroBatch, model_inputs

# (stage, num_stages, dtype) -> a stage model on the CPU, whatever its weights are
BuildStage = Callable[[int, int, torch.dtype], Any]
# (dtype) -> the whole model on the CPU
BuildWhole = Callable[[torch.dtype], nn.Module]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
SPREAD = 0.1  # of the noise on all weights: those that start at 0 or 1 hide a swap or a loss


class CannotRun(Exception):
    """The cut-down copy is not to be had, so that nothing is proven; says why."""


@dataclass(frozen=True)
class Proof:
    """What a comparison found.

    Attributes:
        loss, gradient: greatest difference, as a share of the loss and of the largest gradient.
        place: the first thing that differs, in the order of the forward pass; "" where none does.
        cause: what usually makes it.
        dtype: in which both were computed.
    """

    loss: float
    gradient: float
    dtype: str
    place: str = ""
    cause: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.place


@dataclass
class _Run:
    """What one of both sides computed.

    Attributes:
        borders: number of a border -> the hidden states [B, T, H] that cross it, of each batch.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    borders: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def compare_with_whole(
    build: BuildStage,
    build_whole: BuildWhole,
    *,
    num_stages: int,
    make_batches: Callable[[nn.Module, torch.dtype], Sequence[MicroBatch]],
    is_library: bool = True,
) -> Proof:
    """Runs stages and whole model on the same batches with the same weights.

    Args:
        make_batches: (whole model, dtype of pictures) -> micro-batches with labels.
        is_library: the whole model is transformers' own; else the part on one stage.

    Raises:
        CannotRun: one of the two cannot be built or run.
    """
    for dtype in TOLERANCES:
        try:
            whole = build_whole(dtype).to(dtype).train()
            _randomise(whole)
            batches = make_batches(whole, dtype)
            expected = _run_whole(whole, batches, {}, is_library=is_library)
            if not all(map(math.isfinite, expected.losses)):
                raise ArithmeticError("its loss is not a finite number")
            break
        except Exception as error:  # operators without float64, among all else
            if dtype is torch.float32:
                raise CannotRun(f"the whole model: {_said(error)}") from error
    try:
        stages = [build(stage, num_stages, dtype).train() for stage in range(num_stages)]
        _copy_weights(whole, stages)
        found = _run_stages(stages, batches)
    except Exception as error:
        raise CannotRun(f"its stages: {_said(error)}") from error
    limit = TOLERANCES[dtype]
    loss = max(
        _apart(torch.tensor(one), torch.tensor(other), abs(other) or 1.0)
        for one, other in zip(found.losses, expected.losses, strict=True)
    )
    gaps = _gradient_gaps(found, expected)
    proof = Proof(loss, max(gaps.values(), default=0.0), str(dtype).removeprefix("torch."))
    if loss <= limit and proof.gradient <= limit:
        return proof
    layers = _layers_behind_borders(whole, stages[0], num_stages)
    expected = _run_whole(whole, batches, layers, is_library=is_library)
    place, cause = _find_place(
        found, expected, stages[0].partition, limit, is_loss_off=loss > limit
    )
    first = next((name for name, gap in gaps.items() if gap > limit), "no parameter")
    place += f"the first gradient that differs is that of {first}"
    return replace(proof, place=place, cause=cause)


@torch.no_grad()
def _randomise(whole: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator).to(parameter))
            parameter.requires_grad_(True)


@torch.no_grad()
def _copy_weights(whole: nn.Module, stages: Sequence[Any]) -> None:
    values: dict[str, torch.Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    values |= dict(whole.named_buffers(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.copy_(values[name])
            parameter.requires_grad_(parameter.is_floating_point())
        for name, buffer in stage.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])


def loss_of(output: torch.Tensor | Tensors, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of logits [B, T, V] and, of a mixture of experts, the weighted router loss.

    Scores [B, T, 1] of a reward model are squared.
    """
    logits, extra = output if isinstance(output, tuple) else (output, 0.0)
    labels = batch["labels"][:, 1:]
    if logits.shape[-1] == 1:
        return (logits[:, 1:, 0].square() * (labels != IGNORE)).mean() + extra
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / 8 + extra


def _run_whole(
    whole: nn.Module,
    batches: Sequence[MicroBatch],
    layers: Mapping[int, nn.Module],
    *,
    is_library: bool,
) -> _Run:
    """Args: layers: number of a border -> the first layer behind it, whose input is kept."""
    run = _Run()
    whole.zero_grad()
    forward = run_library_model if is_library else run_stage_model
    hooks = [
        layer.register_forward_pre_hook(_keeper(run, border), with_kwargs=True)
        for border, layer in layers.items()
    ]
    for batch in batches:
        loss = loss_of(forward(whole, model_inputs(batch)), batch)
        loss.backward()
        run.losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    run.gradients = _gradients(whole)
    return run


def _keeper(run: _Run, border: int) -> Callable[..., None]:
    def keep(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if isinstance(value, torch.Tensor):
            run.borders.setdefault(border, []).append(value.detach().clone())

    return keep


def _run_stages(stages: Sequence[Any], batches: Sequence[MicroBatch]) -> _Run:
    run = _Run()

    def watch(stage: int, sent: Tensors) -> None:
        run.borders.setdefault(stage, []).append(sent[0].detach().clone())

    losses = run_chain(stages, list(batches), loss_fn=loss_of, watch=watch)
    run.losses = [loss.item() for loss in losses]
    for stage in stages:
        for name, gradient in _gradients(stage).items():
            # a weight on several stages: the step sums its gradients
            known = run.gradients.get(name)
            run.gradients[name] = gradient if known is None else known + gradient
    return run


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _layers_behind_borders(whole: nn.Module, stage: Any, num_stages: int) -> dict[int, nn.Module]:
    """Number of a border -> the layer of the whole model that comes first behind it."""
    places = {border: sum(stage.partition[: border + 1]) for border in range(num_stages - 1)}
    try:
        return {
            border: whole.get_submodule(stage.layer_name(index))
            for border, index in places.items()
            if index > 0  # behind a stage of a tower there is another thing
        }
    except (PlanError, AttributeError):
        return {}


def _gradient_gaps(found: _Run, expected: _Run) -> dict[str, float]:
    """Name of a parameter, in the model's order -> how far its gradients are apart."""
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0) or 1.0
    gaps = {}
    for name in dict.fromkeys((*expected.gradients, *found.gradients)):
        one, other = found.gradients.get(name), expected.gradients.get(name)
        if one is None or other is None:
            there = [value for value in (one, other) if value is not None]
            gaps[name] = there[0].abs().max().item() / scale
        else:
            gaps[name] = _apart(one, other, scale)
    return gaps


def _apart(one: torch.Tensor, other: torch.Tensor, scale: float) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = (one.double() - other.double()).abs()
    gap = gap.masked_fill(one.isnan() & other.isnan(), 0.0)
    return float("inf") if gap.isnan().any() else gap.max().item() / scale


def _find_place(
    found: _Run, expected: _Run, partition: Sequence[int], limit: float, *, is_loss_off: bool
) -> tuple[str, str]:
    """The first border at which hidden states differ, in words, and what usually makes it."""
    for border in sorted(found.borders):
        pairs = list(zip(found.borders[border], expected.borders.get(border, [])))
        wrong = [pair for pair in pairs if _apart(*pair, pair[1].abs().max().item() or 1) > limit]
        if wrong:
            at = f"layer {sum(partition[: border + 1])} (stage {border} to {border + 1})"
            factor = _factor(*wrong[0])
            return f"the border before {at} is the first that differs{factor}, and ", _cause(border)
    if is_loss_off:
        last = len(partition) - 1
        return f"all borders are equal, stage {last} gives another loss, and ", _cause(last)
    cause = (
        "something that layers read besides the hidden states goes to later stages without its "
        "gradient, or a weight that several stages read is on one of them only"
    )
    return "all borders and the loss are equal; ", cause


def _factor(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The number by which all of it is multiplied, where there is one."""
    factor = ((ours * theirs).sum() / theirs.square().sum()).item()
    off = (ours - factor * theirs).abs().max() / ours.abs().max()
    return f" (it is {factor:.4g} times as large)" if off < 1e-3 else ""


def _cause(stage: int) -> str:
    return (
        f"what the model's code does before, between or behind its layers is done on stage {stage} "
        "too, or left out there: a multiplier or norm of the embeddings, positions, a final norm "
        "of another name, a tensor that layers read besides the hidden states"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def tiny_partition(real: Sequence[int], period: int, *, most: int = 4) -> list[int]:
    """Layers of few stages whose borders lie at the same places of the layers' pattern.

    Args:
        real: layers of each stage of the run.
        period: after how many layers their kinds begin anew.
        most: stages at most; of more the first ones, and the last.
    """
    borders = [sum(real[: stage + 1]) for stage in range(len(real) - 1)]
    if len(borders) > most - 1:
        borders = [*borders[: most - 2], borders[-1]]
    places = [number * period + ((at - 1) % period + 1) for number, at in enumerate(borders)]
    total = (len(borders) + 1) * period
    return [end - start for start, end in zip([0, *places], [*places, total])]


def shown(config: PretrainedConfig, partition: Sequence[int]) -> str:
    """The copy in words."""
    width = getattr(config.get_text_config(decoder=True), "hidden_size", "?")
    return f"{sum(partition)} layers of width {width} on {len(partition)} stages"
