"""The check of training: loss and every gradient of a scaled-down copy's stages, in one process.

In float64 where the model's operators have it. The first difference, and its usual cause, are part
of the result.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.cache_trial import randomise
from stageline.pipeline.stage_passes import MicroBatch, Tensors, model_inputs
from stageline.verify.batches import (
    loss_of,
    ordinary_ids,
    probe_batches,
    run_chain,
    with_facts,
)
from stageline.verify.scaled_copy import ScaledCopy, WrongSplit, copy_weights, shown
from stageline.verify.whole_model import (
    has_images,
    layers_behind_borders,
    on_hidden_states,
    run_library_model,
    run_stage_model,
)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
MOST_WEIGHTS = 20_000_000  # limit of a copy: a user's own configuration may not have become small


class Proof(NamedTuple):
    """The greatest differences, as a share of the loss and of the largest gradient.

    Attributes:
        dtype: in which both were computed.
        place: the first thing that differs, in the order of the forward pass, and its usual cause;
            "" where nothing differs.
    """

    loss: float
    gradient: float
    dtype: str
    place: str = ""


def training(
    copy: ScaledCopy, small: PretrainedConfig, partition: list[int]
) -> tuple[str, dict[str, Any]]:
    """Compare loss and gradients of the stages with those of the whole copy; for `verify`."""
    vision_stages = min(copy.vision_stages, 2)  # the tower has few blocks, too
    with copy.stages(small, partition, vision_stages) as build:
        compare = functools.partial(
            _compare,
            build,
            num_stages=vision_stages + len(partition),
            kind="vision" if has_images(small) else "text",
        )
        with_itself = functools.partial(compare, functools.partial(build, 0, 1), is_library=False)
        reference = f"{type(small).__name__.removesuffix('Config')} of transformers"
        if copy.library_class(small) is None:
            try:
                outline = build(0, 1, torch.float32, device="meta")
            except Exception as error:
                raise RuntimeError(f"the part builds no scaled-down model: {error}") from error
            count = sum(parameter.numel() for parameter in outline.parameters())
            if count > MOST_WEIGHTS:
                raise RuntimeError(f"its scaled-down copy has {count} weights still")
            proof, reference = with_itself(), "the part on one stage"
        else:
            proof = compare(functools.partial(copy.library_model, small))
            if proof.place and not copy.is_ours and not (own := with_itself()).place:
                proof, reference = own, "the part on one stage"
    if proof.place:
        raise WrongSplit(
            f"the split of {small.model_type} by {copy.name} does not compute what {reference} "
            f"computes. On {shown(small, partition)}, the loss is {proof.loss:.1e} off and a "
            f"gradient {proof.gradient:.1e} of the largest ({proof.dtype}); {proof.place}. Use "
            "another `train_model`, fix the stage model (docs/add_a_model.md; `stageline check` "
            "compares in detail), or run on one stage."
        )
    loss, gradient = (
        "to the bit" if share == 0 else f"within {share:.0e} of the largest"
        for share in (proof.loss, proof.gradient)
    )
    told = (
        f"the split of {shown(small, partition)}, equals {reference} in loss ({loss}) and every "
        f"gradient ({gradient})"
    )
    numbers = {"loss": proof.loss, "gradient": proof.gradient, "dtype": proof.dtype}
    return told, {"reference": reference, **numbers}


class _Run(NamedTuple):
    """One side's result.

    Attributes:
        gradients: by name; of a weight on several stages their sum, as a step takes it.
        borders: number of a border -> the hidden states [B, T, H] that cross it, of each batch.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    borders: dict[int, list[torch.Tensor]]


def _gradients(*models: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in (one for model in models for one in model.named_parameters()):
        if parameter.grad is not None:
            known = found.get(name)
            found[name] = parameter.grad.clone() if known is None else known + parameter.grad
    return found


def _compare(
    build: Callable[..., Any],
    build_whole: Callable[[torch.dtype], nn.Module],
    *,
    num_stages: int,
    kind: str,
    is_library: bool = True,
) -> Proof:
    """Runs stages and whole model on the same batches with the same weights.

    Args:
        build: (stage, num_stages, dtype) -> a stage model on the CPU, whatever its weights are.
        build_whole: (dtype) -> the whole model on the CPU.
        kind: "vision" or "text": what the micro-batches hold.
        is_library: the whole model is transformers' own; else the part on one stage.

    Raises:
        RuntimeError: one of the two cannot be built or run.
    """
    for dtype in TOLERANCES:
        side = "the whole model"
        try:
            whole = build_whole(dtype).to(dtype).train()
            randomise(whole)
            batches = probe_batches(getattr(whole, "whole", None) or whole, kind, dtype)
            side = "its stages"
            stages = [build(stage, num_stages, dtype).train() for stage in range(num_stages)]
            side = "the whole model"
            expected = _run_whole(whole, batches, stages[0], is_library=is_library)
            if not all(map(math.isfinite, expected.losses)):
                raise ArithmeticError("its loss is not a finite number")
            side = "its stages"
            copy_weights(whole, stages)
            found = _run_stages(stages, batches)
            break
        except Exception as error:  # operators without float64, among all else
            if dtype is torch.float32:
                said = " ".join(str(error).split())[:300]
                raise RuntimeError(f"{side}: {type(error).__name__}: {said}") from error
    if kind == "text" and is_library:
        _check_looks_back(whole, batches[0])
    limit = TOLERANCES[dtype]
    sides = zip(found.losses, expected.losses, strict=True)
    loss = max(
        _apart(torch.tensor(ours), torch.tensor(theirs), abs(theirs) or 1.0)
        for ours, theirs in sides
    )
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0) or 1.0
    gaps = {  # in the model's order
        name: _apart(found.gradients.get(name), expected.gradients.get(name), scale)
        for name in dict.fromkeys((*expected.gradients, *found.gradients))
    }
    proof = Proof(loss, max(gaps.values(), default=0.0), str(dtype).removeprefix("torch."))
    if loss <= limit and proof.gradient <= limit:
        return proof
    first = next((name for name, gap in gaps.items() if gap > limit), "no parameter")
    place, cause = _find_place(found, expected, batches, stages[0].partition, limit, loss > limit)
    place += f"the first gradient that differs is that of {first}. The usual cause: {cause}"
    return Proof(loss, proof.gradient, proof.dtype, place)


def _run_whole(
    whole: nn.Module, batches: Sequence[MicroBatch], stage: Any, *, is_library: bool
) -> _Run:
    """Keeps the inputs of the layers that come first behind the borders of the split of `stage`."""
    losses, borders = [], dict[int, list[torch.Tensor]]()
    forward = run_library_model if is_library else run_stage_model
    hooks = [
        on_hidden_states(layer, borders.setdefault(border, []).append)
        for border, layer in (layers_behind_borders(whole, stage) or {}).items()
    ]
    for batch in batches:
        loss = loss_of(forward(whole, model_inputs(batch)), batch)
        loss.backward()
        losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    return _Run(losses, _gradients(whole), borders)


def _run_stages(stages: Sequence[Any], batches: Sequence[MicroBatch]) -> _Run:
    borders: dict[int, list[torch.Tensor]] = {}

    def watch(stage: int, sent: Tensors) -> None:
        borders.setdefault(stage, []).append(sent[0].detach().clone())

    losses = run_chain(stages, with_facts(stages, batches), loss_fn=loss_of, watch=watch)
    return _Run([loss.item() for loss in losses], _gradients(*stages), borders)


@torch.no_grad()
def _check_looks_back(whole: Any, batch: MicroBatch) -> None:
    """Refuse a model in which a change of a token changes the outputs before it.

    The configuration of some tells so (`refuse_both_ways`); here the numbers do.
    """
    inputs = {name: value[:1] for name, value in model_inputs(batch).items()}
    ids_1T = inputs["input_ids"]
    changed_1T = ids_1T.clone()
    changed_1T[0, -1] = next(one for one in ordinary_ids(whole.config) if one != ids_1T[0, -1])
    whole.eval()
    before, after = (
        whole(**{**inputs, "input_ids": ids}, use_cache=False).logits[0, -ids_1T.shape[1] : -1]
        for ids in (ids_1T, changed_1T)
    )
    whole.train()
    if _apart(before, after, before.abs().max().item()) > TOLERANCES[torch.float32]:
        raise WrongSplit(
            f"{type(whole).__name__} looks ahead: its output for a token changes with the tokens "
            "that follow. Choose a decoder: a token that sees the next one learns nothing by "
            "predicting it."
        )


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> float:
    if one is None or other is None:
        (there,) = (value for value in (one, other) if value is not None)
        return there.abs().max().item() / scale
    if one.shape != other.shape:
        return float("inf")
    gap = (one.double() - other.double()).abs()
    gap = gap.masked_fill(one.isnan() & other.isnan(), 0.0)
    return float("inf") if gap.isnan().any() else gap.max().item() / scale


def _find_place(
    found: _Run,
    expected: _Run,
    batches: Sequence[MicroBatch],
    partition: Sequence[int],
    limit: float,
    is_loss_off: bool,
) -> tuple[str, str]:
    """The first border at which hidden states differ, in words, and its usual cause."""
    cause = (
        "what the model's code does before, between or behind its layers is done on stage {} too, "
        "or left out there: a multiplier or norm of the embeddings, positions, a final norm of "
        "another name, a tensor that layers read besides the hidden states"
    )
    for border in sorted(found.borders):
        sides = zip(found.borders[border], expected.borders.get(border, []))
        for (ours, theirs), batch in zip(sides, batches):
            # no loss reads the hidden states of padding
            mask = batch["attention_mask"][..., None].bool()
            if ours.shape[:2] == theirs.shape[:2] == mask.shape[:2]:
                ours, theirs = ours.masked_fill(~mask, 0.0), theirs.masked_fill(~mask, 0.0)
            if _apart(ours, theirs, theirs.abs().max().item() or 1) > limit:
                at = f"layer {sum(partition[: border + 1])} (stage {border} to {border + 1})"
                factor = ((ours * theirs).sum() / theirs.square().sum()).item()
                off = (ours - factor * theirs).abs().max() / ours.abs().max()
                times = f" (it is {factor:.4g} times as large)" if off < 1e-3 else ""
                words = f"the border before {at} is the first that differs{times}, and "
                return words, cause.format(border)
    if is_loss_off:
        last = len(partition) - 1
        words = f"all borders are equal, stage {last} gives another loss, and "
        return words, cause.format(last)
    return "all borders and the loss are equal; ", (
        "something that layers read besides the hidden states goes to later stages without its "
        "gradient, or a weight that several stages read is on one of them only"
    )
