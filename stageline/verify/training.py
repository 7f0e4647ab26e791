"""The check of training: loss and every gradient of a scaled-down copy's stages, in one process.

In float64 where the model's operators have it. The first difference is part of the result.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.cache_trial import randomise
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.verify.batches import loss_of, ordinary_ids, probe_batches, with_facts
from stageline.verify.compare import gap, hidden_states, run_stages, run_whole
from stageline.verify.scaled_copy import Checked, ScaledCopy, WrongSplit, copy_weights, shown
from stageline.verify.whole_model import has_images

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
MOST_WEIGHTS = 20_000_000  # limit of a copy: a user's own configuration may not have become small


class Proof(NamedTuple):
    """The greatest differences, as a share of the loss and of the largest gradient.

    Attributes:
        dtype: in which both were computed.
        place: the first thing that differs, in the order of the forward pass; "" for nothing.
    """

    loss: float
    gradient: float
    dtype: str
    place: str = ""


def training(copy: ScaledCopy, small: PretrainedConfig, partition: list[int]) -> Checked:
    """Compare loss and gradients of the stages with those of the whole copy; for `verify`."""
    vision_stages = min(copy.vision_stages, 2)  # the tower has few blocks, too
    with copy.stages(small, partition, vision_stages) as build:
        compare = functools.partial(
            _compare,
            build,
            num_stages=vision_stages + len(partition),
            has_pictures=has_images(small),
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
            "another `train_model`, fix the stage model (docs/add_a_model.md), or run on one stage."
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


def _compare(
    build: Callable[..., Any],
    build_whole: Callable[[torch.dtype], nn.Module],
    *,
    num_stages: int,
    has_pictures: bool,
    is_library: bool = True,
) -> Proof:
    """Runs stages and whole model on the same batches with the same weights.

    Args:
        build: (stage, num_stages, dtype) -> a stage model on the CPU, whatever its weights are.
        build_whole: (dtype) -> the whole model on the CPU.
        is_library: the whole model is transformers' own; else the part on one stage.

    Raises:
        RuntimeError: one of the two cannot be built or run.
    """
    for dtype in TOLERANCES:
        side = "the whole model"
        try:
            whole = build_whole(dtype).to(dtype).train()
            randomise(whole)
            tower: Any = getattr(whole, "whole", None) or whole
            batches = probe_batches(tower.config, dtype, tower=tower if has_pictures else None)
            side = "its stages"
            stages = [build(stage, num_stages, dtype).train() for stage in range(num_stages)]
            side = "the whole model"
            expected = run_whole(whole, batches, stages[0], loss_fn=loss_of, is_library=is_library)
            if not all(map(math.isfinite, expected.losses)):
                raise ArithmeticError("its loss is not a finite number")
            side = "its stages"
            copy_weights(whole, stages)
            found = run_stages(stages, with_facts(stages, batches), loss_fn=loss_of)
            break
        except Exception as error:  # operators without float64, among all else
            if dtype is torch.float32:
                said = " ".join(str(error).split())[:300]
                raise RuntimeError(f"{side}: {type(error).__name__}: {said}") from error
    if is_library and not has_pictures:
        _check_looks_back(whole, batches[0])
    limit = TOLERANCES[dtype]
    ours, theirs = (torch.tensor(side.losses, dtype=dtype) for side in (found, expected))
    sizes = theirs.abs().masked_fill(theirs == 0, 1.0)
    loss = gap(ours / sizes, theirs / sizes)
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0) or 1.0
    gaps = {  # in the model's order
        name: gap(found.gradients.get(name), expected.gradients.get(name)) / scale
        for name in dict.fromkeys((*expected.gradients, *found.gradients))
    }
    gradient, place = max(gaps.values(), default=0.0), ""
    if not (loss <= limit and gradient <= limit):
        place = "all borders and the loss are equal"
        if loss > limit:
            place = f"all borders are equal, stage {num_stages - 1} gives another loss"
        for border, ours, theirs in hidden_states(found, expected, batches):
            if gap(ours, theirs) > limit * (theirs.abs().max().item() or 1):
                factor = ((ours * theirs).sum() / theirs.square().sum()).item()
                off = (ours - factor * theirs).abs().max() / ours.abs().max()
                times = f" (it is {factor:.4g} times as large)" if off < 1e-3 else ""
                place = (
                    f"the border before layer {sum(stages[0].partition[: border + 1])} (stage "
                    f"{border} to {border + 1}) is the first that differs{times}"
                )
                break
        first = next((name for name, apart in gaps.items() if apart > limit), "no parameter")
        place += f"; the first gradient that differs is that of {first}"
    return Proof(loss, gradient, str(dtype).removeprefix("torch."), place)


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
    if gap(before, after) > TOLERANCES[torch.float32] * before.abs().max().item():
        raise WrongSplit(
            f"{type(whole).__name__} looks ahead: its output for a token changes with the tokens "
            "that follow. Choose a decoder: a token that sees the next one learns nothing by "
            "predicting it."
        )
