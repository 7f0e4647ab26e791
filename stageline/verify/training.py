"""The check of training: loss and every gradient of a scaled-down copy's stages, in one process.

In float64 where the model's operators know it. The first difference, and its usual cause, are part
of the result.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from stageline.verify.reference import (
    layers_behind_borders,
    on_hidden_states,
    run_library_model,
    run_stage_model,
)
from stageline.verify.scaled_copy import ScaledCopy, WrongSplit, refuse_large, shown
from stageline.verify.setup import copies, copy_weights, has_images

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Proof:
    """What a comparison found.

    Attributes:
        loss, gradient: greatest difference, as a share of the loss and of the largest gradient.
        place: the first thing that differs, in the order of the forward pass; "" where none does.
        cause: its usual cause.
        dtype: in which both were computed.
    """

    loss: float
    gradient: float
    dtype: str
    place: str = ""
    cause: str = ""


def training(
    copy: ScaledCopy, small: PretrainedConfig, partition: list[int]
) -> tuple[str, dict[str, Any]]:
    """Compare loss and gradients of the stages with those of the whole copy; for `verify`."""
    proof, reference = _compare(copy, small, partition)
    if proof.place:
        raise WrongSplit(
            f"the split of {small.model_type} by {copy.name} does not compute what {reference} "
            f"computes. On {shown(small, partition)}, the loss is {proof.loss:.1e} off and a "
            f"gradient {proof.gradient:.1e} of the largest ({proof.dtype}); {proof.place}. The "
            f"usual cause: {proof.cause}. Use another `train_model`, fix the stage model "
            "(docs/add_a_model.md; `stageline check` compares in detail), or run on one stage."
        )
    told = (
        f"the split of {shown(small, partition)}, equals {reference} in loss "
        f"({_within(proof.loss)}) and every gradient ({_within(proof.gradient)})"
    )
    numbers = {"loss": proof.loss, "gradient": proof.gradient, "dtype": proof.dtype}
    return told, {"reference": reference, **numbers}


def _within(share: float) -> str:
    return "to the bit" if share == 0 else f"within {share:.0e} of the largest"


def _compare(copy: ScaledCopy, small: PretrainedConfig, partition: list[int]) -> tuple[Proof, str]:
    """The result, and what the stages were compared with."""
    vision_stages = min(copy.vision_stages, 2)  # the tower has few blocks, too
    with copies(copy, small, partition, vision_stages) as build:
        compare = functools.partial(
            _compare_with_whole,
            build,
            num_stages=vision_stages + len(partition),
            kind="vision" if has_images(small) else "text",
        )
        with_itself = functools.partial(compare, functools.partial(build, 0, 1), is_library=False)
        reference = f"{type(small).__name__.removesuffix('Config')} of transformers"
        if copy.library_class(small) is None:
            refuse_large(build)
            return with_itself(), "the part on one stage"
        proof = compare(functools.partial(copy.library_model, small))
        if proof.place and not copy.is_ours:
            own = with_itself()
            if not own.place:
                return own, "the part on one stage"
        return proof, reference


@torch.no_grad()
def _check_looks_back(whole: Any, batch: MicroBatch) -> None:
    """Refuses a model in which what comes before a token changes with it.

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
            f"{type(whole).__name__} looks ahead: what it says of a token changes with those that "
            "follow. A decoder was expected, because a token that sees the next one learns nothing "
            "by predicting it, and has nothing to answer with. Choose another model."
        )


@dataclass
class _Run:
    """What one of both sides computed.

    Attributes:
        borders: number of a border -> the hidden states [B, T, H] that cross it, of each batch.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    borders: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def drop_padding(self, batches: Sequence[MicroBatch]) -> None:
        """Makes zeros of hidden states of padding, which no loss reads: they need not be equal."""
        masks = [batch["attention_mask"][..., None].bool() for batch in batches]
        for border, hidden in self.borders.items():
            self.borders[border] = [
                one.masked_fill(~mask, 0.0) if one.shape[:2] == mask.shape[:2] else one
                for one, mask in zip(hidden, masks, strict=False)
            ]


def _compare_with_whole(
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
        try:
            whole = build_whole(dtype).to(dtype).train()
            randomise(whole)
            batches = probe_batches(getattr(whole, "whole", None) or whole, kind, dtype)
            expected = _run_whole(whole, batches, {}, is_library=is_library)
            if not all(map(math.isfinite, expected.losses)):
                raise ArithmeticError("its loss is not a finite number")
            break
        except Exception as error:  # operators without float64, among all else
            if dtype is torch.float32:
                raise RuntimeError(f"the whole model: {_said(error)}") from error
    try:
        stages = [build(stage, num_stages, dtype).train() for stage in range(num_stages)]
        copy_weights(whole, stages)
        found = _run_stages(stages, batches)
    except Exception as error:
        raise RuntimeError(f"its stages: {_said(error)}") from error
    if kind == "text" and is_library:
        _check_looks_back(whole, batches[0])
    limit = TOLERANCES[dtype]
    loss = max(
        _apart(torch.tensor(one), torch.tensor(other), abs(other) or 1.0)
        for one, other in zip(found.losses, expected.losses, strict=True)
    )
    gaps = _gradient_gaps(found, expected)
    proof = Proof(loss, max(gaps.values(), default=0.0), str(dtype).removeprefix("torch."))
    if loss <= limit and proof.gradient <= limit:
        return proof
    layers = layers_behind_borders(whole, stages[0]) or {}
    expected = _run_whole(whole, batches, layers, is_library=is_library)
    for run in (found, expected):
        run.drop_padding(batches)
    place, cause = _find_place(
        found, expected, stages[0].partition, limit, is_loss_off=loss > limit
    )
    first = next((name for name, gap in gaps.items() if gap > limit), "no parameter")
    place += f"the first gradient that differs is that of {first}"
    return replace(proof, place=place, cause=cause)


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
        on_hidden_states(layer, run.borders.setdefault(border, []).append)
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


def _run_stages(stages: Sequence[Any], batches: Sequence[MicroBatch]) -> _Run:
    run = _Run()

    def watch(stage: int, sent: Tensors) -> None:
        run.borders.setdefault(stage, []).append(sent[0].detach().clone())

    told = with_facts(stages, batches)
    losses = run_chain(stages, told, loss_fn=loss_of, watch=watch)
    run.losses = [loss.item() for loss in losses]
    run.gradients = _gradients(*stages)
    return run


def _gradients(*models: nn.Module) -> dict[str, torch.Tensor]:
    """By name; of a weight on several stages their sum, as a step takes it."""
    found: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                found[name] = found[name] + grad if name in found else grad.clone()
    return found


def _gradient_gaps(found: _Run, expected: _Run) -> dict[str, float]:
    """Name of a parameter, in the model's order -> how far its gradients are apart."""
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0) or 1.0
    return {
        name: _apart(found.gradients.get(name), expected.gradients.get(name), scale)
        for name in dict.fromkeys((*expected.gradients, *found.gradients))
    }


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> float:
    if one is None or other is None:
        there = other if one is None else one
        assert there is not None  # one of the two has it
        return there.abs().max().item() / scale
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
