"""Run a whole model and its stages on the same micro-batches, and find where they differ.

Shapes: B rows, T tokens, H hidden size.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stageline.errors import PlanError
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.training.loss_part import Output
from stageline.verify.batches import LossFn, run_chain


class Passes(NamedTuple):
    """Results of forward and backward passes.

    Attributes:
        losses: of each micro-batch.
        gradients: by name; of a weight on several stages their sum, as a step takes it.
        borders: (number of a border, of a batch) -> the hidden states [B, T, H] that cross it.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    borders: dict[tuple[int, int], torch.Tensor]


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


def run_whole(
    whole: nn.Module,
    batches: Sequence[MicroBatch],
    stage: Any,
    *,
    loss_fn: LossFn,
    is_library: bool,
) -> Passes:
    """Run the whole model forward and backward.

    Args:
        stage: any stage of the split. The hidden states at its borders are the inputs of the layers
            behind them, since some models add to what was sent; borders inside a tower are left
            out, and all borders of a model that does not name its layers.
        is_library: the model is of transformers; else it is the part on one stage.
    """
    losses: list[float] = []
    borders: dict[tuple[int, int], torch.Tensor] = {}

    def keep(border: int, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if isinstance(value, torch.Tensor):
            borders[border, len(losses)] = value.detach().clone()

    places = enumerate(itertools.accumulate(stage.partition[:-1]))
    try:
        layers = {
            border: whole.get_submodule(stage.layer_name(at)) for border, at in places if at > 0
        }
    except (PlanError, AttributeError):
        layers = {}
    hooks = [
        layer.register_forward_pre_hook(functools.partial(keep, border), with_kwargs=True)
        for border, layer in layers.items()
    ]
    whole.zero_grad()
    run = run_library_model if is_library else run_stage_model
    for batch in batches:
        loss = loss_fn(run(whole, model_inputs(batch)), batch)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    return Passes(losses, _gradients(whole), borders)


def run_stages(
    stages: Sequence[Any],
    batches: Sequence[MicroBatch],
    *,
    loss_fn: LossFn,
    splits_backward: bool = False,
) -> Passes:
    """Run all stages forward and backward, one after the other, as a pipeline would."""
    borders: dict[tuple[int, int], torch.Tensor] = {}
    for stage in stages:
        stage.zero_grad()
    losses = run_chain(
        stages, batches, loss_fn=loss_fn, splits_backward=splits_backward, borders=borders
    )
    return Passes([loss.item() for loss in losses], _gradients(*stages), borders)


def _gradients(*models: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in (one for model in models for one in model.named_parameters()):
        if parameter.grad is not None:
            known = found.get(name)
            found[name] = parameter.grad if known is None else known + parameter.grad
    return found


def hidden_states(
    found: Passes, expected: Passes, batches: Sequence[MicroBatch]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each border with the hidden states of the stages and of the whole model.

    Those of padding are 0, since no loss reads them.
    """
    for border, index in sorted(found.borders.keys() & expected.borders.keys()):
        ours, theirs = (side.borders[border, index] for side in (found, expected))
        mask = batches[index].get("attention_mask")
        if mask is not None and ours.shape[:2] == theirs.shape[:2] == mask.shape:
            is_padding = mask[..., None] == 0
            ours, theirs = ours.masked_fill(is_padding, 0.0), theirs.masked_fill(is_padding, 0.0)
        yield border, ours, theirs


def gap(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference of two numbers; infinite for other shapes.

    NaN equals NaN, which attention makes in rows of padding. A tensor that is absent counts as 0.
    """
    if one is None or other is None:
        (there,) = (value for value in (one, other) if value is not None)
        return there.abs().max().item()
    if one.shape != other.shape:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    apart = (one.detach() - other.detach()).abs()
    apart = apart.masked_fill(one.isnan() & other.isnan(), 0.0)
    return float("inf") if apart.isnan().any() else apart.max().item()
