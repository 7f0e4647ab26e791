"""Compares the names of all stages before weights are read: stages are built on meta for it.

Every rank calls these together. A part that cannot be built so is compared when it is filled.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stageline.checkpoint.adapter import base_of
from stageline.checkpoint.few_bit import stored_settings
from stageline.checkpoint.files import (
    find_checkpoint,
    list_names,
    misfits,
    other_shape,
    tensor_shapes,
    weight_files,
)
from stageline.distributed.ranks import Ranks
from stageline.errors import CheckpointError
from stageline.modules.lora import WRAPPED, is_lora_name
from stageline.modules.stage_names import StageNames, check_names, names_of_stage

# (stage, num_stages) -> a stage model without weights, on meta
Outline = Callable[..., Any]


def check_outlines(
    outline: Outline,
    *,
    stages: Sequence[int],
    num_stages: int,
    ranks: Ranks,
    checkpoint: str | None,
    has_shapes: bool = False,
) -> bool:
    """Refuses stages whose names do not add up to the whole model, or to the checkpoint.

    Args:
        stages: those of this rank.
        ranks: of one pipeline.
        checkpoint: the folder that the stages will be filled from; None: they start at random.
        has_shapes: compare shapes with the checkpoint, too. Loading does so, with the weights.

    Returns:
        Whether it could be compared: a part may not be able to build a stage without weights.

    Raises:
        UserError: names are missing, or on several stages and not shared.
        CheckpointError: the checkpoint holds weights that no stage reads, or is of another model.
    """

    def names(stage: int, count: int) -> StageNames | None:
        try:
            with torch.random.fork_rng(devices=[]):
                return names_of_stage(outline(stage, num_stages=count))
        except Exception:
            return None  # building the stage itself raises a better error

    told = [one for some in ranks.gather([names(s, num_stages) for s in stages]) for one in some]
    found = [one for one in told if one is not None]
    if len(found) < len(told):
        return False
    single = None
    if found[0].whole is None:  # a part that builds its own modules
        with torch.device("meta"):  # the whole model may be too large to be anywhere else
            single = ranks.gather(names(0, 1) if ranks.rank == 0 else None)[0]
    _compare(found, single, ranks=ranks, checkpoint=checkpoint)
    is_few_bit = checkpoint is not None and stored_settings(base_of(find_checkpoint(checkpoint)))
    if checkpoint is not None and has_shapes and not is_few_bit:  # packed weights differ
        _check_shapes(found, checkpoint)
    return True


def check_filled_stages(models: Sequence[Any], *, ranks: Ranks, checkpoint: str | None) -> None:
    """Check the names of stages that are already built; raises as `check_outlines` does."""
    told = ranks.gather([names_of_stage(model) for model in models])
    _compare([one for some in told for one in some], None, ranks=ranks, checkpoint=checkpoint)


def _compare(
    found: list[StageNames], single: StageNames | None, *, ranks: Ranks, checkpoint: str | None
) -> None:
    found.sort(key=lambda one: one.stage)
    check_names(found, found[0].whole or (None if single is None else single.held))

    def check_files() -> None:
        """Every weight of the checkpoint is read by some stage."""
        folder = base_of(find_checkpoint(str(checkpoint)))
        read = {name for one in found for name in one.on_disk}
        unknown = {
            name
            for name in weight_files(folder, fetches=False)
            if name not in read
            and not is_lora_name(name)
            and WRAPPED not in name.split(".")
            and not any(name.startswith(one.unread) for one in found)
        }
        if unknown:
            raise CheckpointError(
                f"{folder} does not fit the {len(found)} stages of {found[0].model}: "
                f"{len(unknown)} names belong to no stage: {list_names(unknown)}. Check that "
                "`model_path` belongs to this model, and that each layer is on a stage under its "
                "own number."
            )

    if found[0].whole is None and checkpoint is not None:
        ranks.on_first(check_files)


def _check_shapes(found: Sequence[StageNames], checkpoint: str) -> None:
    """Compares shapes, and names that are alike but for a number; others may be older names."""
    folder = base_of(find_checkpoint(checkpoint))
    files = weight_files(folder, fetches=False)
    shapes = tensor_shapes({path for path in files.values() if path.exists()})
    held = {name: shape for stage in found for name, shape in stage.held.shapes.items()}

    def unmatched(names: set[str], others: set[str]) -> set[str]:
        forms = {re.sub(r"\.\d+\.", ".0.", name) for name in others}
        return {name for name in names - others if re.sub(r"\.\d+\.", ".0.", name) in forms}

    wrong = {
        other_shape(name, shapes[name], shape)
        for name, shape in held.items()
        if shape is not None and shapes.get(name, shape) != shape
    }
    unknown = {
        name
        for name in unmatched(set(files), set(held))
        if not any(name.startswith(one.unread) for one in found)
    }
    problems = misfits(unmatched(set(held), set(files)), unknown, wrong)
    if problems:
        raise CheckpointError(
            f"{folder} does not fit its model: {problems}. Copy the folder again, or give the "
            "configuration of these weights."
        )
