"""Runs all stages of a model one after the other in one process, as a pipeline would.

Each stage has its own graph; only what the stage model declares crosses a border, and only the
first one sees pixels. For the proof at the start of a run, and for parity tests over many splits,
where processes would take too long.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn

from stageline.pipeline.actions import Kind
from stageline.pipeline.borders import batch_input, batch_output
from stageline.pipeline.stage_passes import MicroBatch, StagePasses, Tensors, model_inputs

LossFn = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]
# (stage, what it sends on of a micro-batch)
Watch = Callable[[int, Tensors], None]


def run_chain(
    stages: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    *,
    loss_fn: LossFn,
    splits_backward: bool = False,
    watch: Watch | None = None,
) -> list[torch.Tensor]:
    """Forward and backward passes of all micro-batches; gradients add up in `.grad`.

    Args:
        loss_fn: (output of the last stage, micro-batch) -> its share of the loss.
        splits_backward: gradients of inputs first, those of weights later, as zero-bubble
            schedules do.
        watch: sees what crosses each border.

    Returns:
        The loss of each micro-batch.
    """
    chain = _passes(stages)
    losses = []
    for index, batch in enumerate(micro_batches):
        losses.append(_forward(chain, index, batch, loss_fn, watch))
    for index in range(len(micro_batches)):
        _backward(chain, index, splits_backward)
    return losses


@torch.no_grad()
def evaluate_chain(
    stages: Sequence[nn.Module], micro_batches: Sequence[MicroBatch], *, loss_fn: LossFn
) -> list[torch.Tensor]:
    """The loss of each micro-batch without gradients; modes stay as they are."""
    chain = _passes(stages)
    return [_forward(chain, index, batch, loss_fn) for index, batch in enumerate(micro_batches)]


def _passes(stages: Sequence[nn.Module]) -> list[StagePasses]:
    chain, is_trained = [], False
    for model in stages:
        sends = is_trained
        is_trained = is_trained or any(p.requires_grad for p in model.parameters())
        chain.append(
            StagePasses(model, computes_grad=is_trained, sends_grad=sends, saving=nullcontext)
        )
    return chain


def drop_pixels(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch as a later stage gets it."""
    return {name: value for name, value in micro_batch.items() if not name.startswith("pixel")}


def _forward(
    chain: Sequence[StagePasses],
    index: int,
    batch: MicroBatch,
    loss_fn: LossFn,
    watch: Watch | None = None,
) -> torch.Tensor:
    tensors: Tensors = (batch["input_ids"],)
    for number, passes in enumerate(chain):
        own = batch if passes.model.stage == 0 else drop_pixels(batch)
        is_last = passes.model.is_last
        loss_of = (lambda output, own=own: loss_fn(output, own)) if is_last else None
        _check(tensors, batch_input(passes.model, own))
        made = passes.forward(index, tensors, model_inputs(own), loss_of=loss_of)
        if not is_last:
            _check(made, batch_output(passes.model, own))
            if watch is not None:
                watch(number, made)
        # a network copies; here a view of one stage's output is not to be another's input
        tensors = tuple(value.detach().clone() for value in made)
    return tensors[0]


def _backward(chain: Sequence[StagePasses], index: int, splits_backward: bool) -> None:
    grads: Tensors | None = None
    for passes in reversed(chain):
        if not passes.computes_grad:
            break
        kind = Kind.INPUT_GRAD if splits_backward and passes.sends_grad else Kind.BACKWARD
        grads = passes.backward(index, kind, grads)
    if splits_backward:
        for passes in chain:
            if passes.sends_grad:
                passes.backward(index, Kind.WEIGHT_GRAD, None)


def _check(came: Tensors, metas: Sequence[torch.Tensor]) -> None:
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in came]
    declared = [(tuple(meta.shape), meta.dtype) for meta in metas]
    assert found == declared, f"{found} crossed a border, {declared} was declared"
