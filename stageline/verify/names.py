"""Compares the names of all stages before weights are read: stages are built on meta for it.

Every rank calls these together. A part that cannot be built so is compared when it is filled.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stageline.checkpoint.adapter import base_of
from stageline.checkpoint.files import (
    find_checkpoint,
    list_names,
    misfits,
    other_shape,
    tensor_shapes,
    weight_files,
)
from stageline.checkpoint.layout import Ranks
from stageline.errors import CheckpointError
from stageline.modules.lora import WRAPPED, is_lora_name
from stageline.modules.stage_names import StageNames, check_names, names_of_stage

MOST_SHARED = 256  # layers that may have one set of weights
# (stage, num_stages) -> a stage model without weights, on meta
Outline = Callable[[int, int], Any]


def check_outlines(
    outline: Outline,
    *,
    stages: Sequence[int],
    num_stages: int,
    ranks: Ranks,
    checkpoint: str | None,
) -> bool:
    """Refuses stages whose names do not add up to the whole model, or to the checkpoint.

    Args:
        stages: those of this rank.
        ranks: of one pipeline.
        checkpoint: what the stages will be filled from; None: they start at random.

    Returns:
        Whether it could be compared: a part may not be able to build a stage without weights.

    Raises:
        UserError: names are missing, or on several stages and not shared.
        CheckpointError: the checkpoint holds weights that no stage reads.
    """
    own = [_names_or_none(outline, stage, num_stages) for stage in stages]
    told = [one for some in ranks.gather(own) for one in some]
    found = [one for one in told if one is not None]
    if len(found) < len(told):
        return False
    _compare(found, outline, ranks=ranks, checkpoint=checkpoint)
    return True


def check_filled_stages(models: Sequence[Any], *, ranks: Ranks, checkpoint: str | None) -> None:
    """As `check_outlines`, of stages that are there; raises the same."""
    told = ranks.gather([names_of_stage(model) for model in models])
    found = [one for some in told for one in some]
    _compare(found, None, ranks=ranks, checkpoint=checkpoint)


def check_fit(outline: Outline, *, num_layers: int, num_stages: int, checkpoint: str) -> None:
    """Refuses weights that are not of this model, by names and shapes; no weight is read.

    A part that cannot build a stage without weights is passed over.

    Args:
        num_layers: that the model's configuration speaks of.
        checkpoint: a model folder; files that are still on a hub are passed over.

    Raises:
        UserError, CheckpointError: as `check_outlines`; or the shapes are others.
    """
    folder = base_of(find_checkpoint(checkpoint))
    files = weight_files(folder, fetches=False)
    # a model is built for the comparison, even if without values: not one of a billion layers
    if num_layers > max(len(files), MOST_SHARED):
        raise CheckpointError(
            f"{folder} has {len(files)} weights; its configuration speaks of {num_layers:,} "
            "layers, and each was expected to have some of its own. The one is not of the other: "
            "copy the folder again."
        )
    told = [_names_or_none(outline, stage, num_stages) for stage in range(num_stages)]
    found = [one for one in told if one is not None]
    if len(found) < num_stages:
        return
    _compare(found, outline, ranks=Ranks.of(None), checkpoint=checkpoint)
    if problems := _misfits_of(found, files):
        raise CheckpointError(
            f"{folder} does not fit its model: {problems}. The weights of its configuration were "
            "expected: copy the folder again, or give the configuration of these weights."
        )


def _misfits_of(stages: Sequence[StageNames], files: Mapping[str, Path]) -> str:
    """Names of one that are like those of the other but for a number, and other shapes.

    Some files have older names, which the library knows: these are not looked at.
    """
    shapes = tensor_shapes({path for path in files.values() if path.exists()})
    held = {name: shape for stage in stages for name, shape in stage.held.shapes.items()}
    unread = tuple(beginning for stage in stages for beginning in stage.unread)
    forms, forms_on_disk = {_form(name) for name in held}, {_form(name) for name in files}
    unknown = {name for name in files.keys() - held.keys() if _form(name) in forms}
    return misfits(
        {name for name in held.keys() - files.keys() if _form(name) in forms_on_disk},
        {name for name in unknown if not name.startswith(unread)},
        {
            other_shape(name, shapes[name], shape)
            for name, shape in held.items()
            if shape is not None and shapes.get(name, shape) != shape
        },
    )


def _form(name: str) -> str:
    return re.sub(r"\.\d+\.", ".0.", name)


def _compare(
    found: list[StageNames],
    outline: Outline | None,
    *,
    ranks: Ranks,
    checkpoint: str | None,
) -> None:
    found.sort(key=lambda one: one.stage)
    whole = found[0].whole
    if whole is None and outline is not None:
        single = _names_of_one_stage(outline) if ranks.rank == 0 else None
        whole = ranks.gather(None if single is None else single.held)[0]
    check_names(found, whole)
    if found[0].whole is None and checkpoint is not None:
        ranks.on_first(lambda: _check_files(found, checkpoint))


def _names_or_none(outline: Outline, stage: int, num_stages: int) -> StageNames | None:
    try:
        with torch.random.fork_rng(devices=[]):
            return names_of_stage(outline(stage, num_stages))
    except Exception:
        return None  # the stage itself, built next, tells better


def _names_of_one_stage(outline: Outline) -> StageNames | None:
    """Of a part that builds its own modules: what it has on one stage."""
    with torch.device("meta"):  # it may be too large to be anywhere else
        return _names_or_none(outline, 0, 1)


def _check_files(found: Sequence[StageNames], checkpoint: str) -> None:
    """Every weight of the checkpoint is read by some stage."""
    folder = base_of(find_checkpoint(checkpoint))
    read = {name for one in found for name in one.on_disk}
    unread = tuple(beginning for one in found for beginning in one.unread)
    unknown = {
        name
        for name in weight_files(folder, fetches=False)
        if name not in read
        and not is_lora_name(name)
        and WRAPPED not in name.split(".")
        and not name.startswith(unread)
    }
    if unknown:
        raise CheckpointError(
            f"{folder} does not fit the {len(found)} stages of {found[0].model}: {len(unknown)} "
            f"names belong to no stage: {list_names(unknown)}. Every weight was expected to be "
            "read by a stage, because what none reads would be left out of training and of the "
            "next checkpoint. Check that `model_path` belongs to this model, and that each layer "
            "is on a stage under its own number."
        )
