"""Check the stage of each weight of the whole model: no name twice, missing or unknown.

By its name a weight's gradients are summed over the stages that share it, and it is saved and
resumed. Two stages that call different weights by one name train, and one of them is lost in the
first checkpoint. Names and shapes only: knows neither values nor ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stageline.errors import UserError
from stageline.modules.lora import unwrapped
from stageline.modules.new_rows import is_row_name

Shape = tuple[int, ...] | None  # None: kept in another form here, so it says nothing
NUM_SHOWN = 4


@dataclass(frozen=True)
class Names:
    """Weights of a model: parameters and persistent buffers, without adapters.

    Attributes:
        shapes: of each weight, under the first name that the model has for it.
        aliases: any further name of a weight -> its first one.
        buffers: those names that are buffers.
    """

    shapes: dict[str, Shape]
    aliases: dict[str, str]
    buffers: frozenset[str]

    @property
    def tied(self) -> frozenset[str]:
        """First names of weights that the model has under several."""
        return frozenset(self.aliases.values())


@dataclass(frozen=True)
class StageNames:
    """Names that one stage gives its weights.

    Attributes:
        shared: names that it may hold together with other stages.
        whole: those of the unsplit model that it was cut from; None: it builds its own modules.
        on_disk: names that it reads of a checkpoint.
        unread: beginnings of names in a checkpoint that the model has no use for.
    """

    stage: int
    model: str
    held: Names
    shared: frozenset[str]
    whole: Names | None
    on_disk: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()


def names_in(model: nn.Module) -> Names:
    """Return the names and shapes of the weights of a model."""
    shapes: dict[str, Shape] = {}
    aliases: dict[str, str] = {}
    buffers: set[str] = set()
    first: dict[int, str] = {}
    with unwrapped(model):
        for name, tensor, is_buffer in _weights(model):
            known = first.setdefault(id(tensor), name)
            if known != name:
                aliases[name] = known
                continue
            holder = model.get_submodule(name.rpartition(".")[0])
            is_quantised = getattr(holder, "is_quantised", False)
            shapes[name] = None if is_quantised else tuple(tensor.shape)
            if is_buffer:
                buffers.add(name)
    return Names(shapes, aliases, frozenset(buffers))


def _weights(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_row_name(name):
            yield name, parameter, False
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "is_quantised", False):
            continue  # its numbers in few bits, which no whole model has
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer, True


def names_on_disk(model: Any) -> dict[str, str]:
    """Map the parameter names of a stage to those in a checkpoint without the outermost LoRA.

    A stage model gives names on disk -> names here. A map of the other direction is recognised by
    its keys: more of them than of its values are names of the stage.
    """
    key_map: dict[str, str] = model.get_key_map_without_last_lora()
    here = model.state_dict().keys()
    if len(here & key_map.keys()) > len(here & set(key_map.values())):
        return key_map
    return {name: there for there, name in key_map.items()}


def names_of_stage(model: Any) -> StageNames:
    """Return the names that a stage model gives its weights."""
    has_map = hasattr(model, "get_key_map_without_last_lora")
    whole: Names | None = getattr(model, "whole_names", None)
    if whole is not None:
        shapes = {  # new tokens add rows to embedding and head
            name: None if name.rpartition(".")[0] in model.vocabulary else shape
            for name, shape in whole.shapes.items()
        }
        whole = replace(whole, shapes=shapes)
    return StageNames(
        stage=model.stage,
        model=type(model).__name__,
        held=names_in(model),
        shared=frozenset(getattr(model, "shared_names", ())),
        whole=whole,
        on_disk=frozenset(names_on_disk(model).values() if has_map else ()),
        unread=tuple(getattr(model, "unused_names", ())),
    )


def check_names(stages: Sequence[StageNames], whole: Names | None = None) -> None:
    """Compare all stages of a model with each other and with the whole model.

    Raises:
        UserError: a name is on several stages and not shared, on none, in no whole model, or has
            another shape; all kinds of it are told, with examples.
    """
    whole = whole or next((one.whole for one in stages if one.whole is not None), None)
    aliases = {} if whole is None else whole.aliases
    held: dict[str, list[int]] = {}  # first name of the whole model -> the stages that hold it
    for one in stages:
        for name in dict.fromkeys(aliases.get(name, name) for name in one.held.shapes):
            held.setdefault(name, []).append(one.stage)
    may = shared_names(stages, whole)
    faults: dict[str, list[str]] = {
        "names on several stages": [
            f"{name} on stages {', '.join(map(str, places))}"
            for name, places in held.items()
            if len(places) > 1 and name not in may
        ]
    }
    expected: dict[str, tuple[int, ...]] = {}
    if whole is not None:
        faults["tied under another name"] = [  # gradients are summed by name
            f"{name} on stage {one.stage} is {whole.aliases[name]}"
            for one in stages
            for name in one.held.shapes
            if name in whole.aliases
        ]
        faults["on no stage"] = [name for name in whole.shapes if name not in held]
        faults["in no whole model"] = [
            f"{name} on stage {places[0]}"
            for name, places in held.items()
            if name not in whole.shapes
        ]
        expected = {name: shape for name, shape in whole.shapes.items() if shape is not None}
    others = faults["of another shape"] = []
    for one in stages:
        for name, shape in one.held.shapes.items():
            if shape is not None and shape != (other := expected.setdefault(name, shape)):
                others.append(f"{name} {list(shape)} on stage {one.stage}, else {list(other)}")
    told = []
    for kind, ones in faults.items():
        if ones:
            more = f" and {len(ones) - NUM_SHOWN} more" if len(ones) > NUM_SHOWN else ""
            told.append(f"{len(ones)} {kind} ({', '.join(ones[:NUM_SHOWN])}{more})")
    if told:
        raise UserError(
            f"the weights of {stages[0].model} on {len(stages)} stages do not add up to one model: "
            f"{'; '.join(told)}. Keep the places of other stages' layers in a ModuleList with a "
            "PassThrough, and name shared weights in shared_names (docs/add_a_model.md)."
        )


def shared_names(stages: Sequence[StageNames], whole: Names | None = None) -> frozenset[str]:
    """Names that several stages may hold: declared, or tied in the whole model."""
    tied = frozenset() if whole is None else whole.tied
    return tied.union(*(one.shared for one in stages))
