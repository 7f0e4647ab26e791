"""Writes an adapter folder: each stage its part, then all parts as one. Knows no ranks."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from stageline import chaos
from stageline.checkpoint.adapter import PEFT_PREFIX, STACK_FOLDER
from stageline.checkpoint.adapter_out import (
    adapter_facts,
    adapter_kinds,
    adapter_tensors,
    peft_config,
)
from stageline.checkpoint.adapter_rows import ROWS_OF_PEFT, rows_share
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, write_tensors
from stageline.checkpoint.tasks import task_of
from stageline.errors import UserError
from stageline.modules.lora import WRAPPED, is_lora_name, lora_stacks, strip_lora
from stageline.modules.new_rows import is_row_name

SUM = -1  # stands for all levels as one adapter


def trained_names(stage: nn.Module) -> list[str]:
    """Parameters besides the adapters that this stage trains; a tied one under each name.

    Those, too, that an earlier adapter on which this run builds trained whole.

    Raises:
        UserError: a weight below an adapter is trained: an adapter folder has no place for it.
    """
    names = []
    carried = getattr(stage, "carried", ())
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        is_kept = parameter.requires_grad or strip_lora(name) in carried
        if not is_kept or is_lora_name(name) or is_row_name(name):
            continue
        if WRAPPED in name.split("."):
            raise UserError(
                f"{strip_lora(name)} is trained and has a LoRA as well, one of both was expected: "
                "an adapter folder holds no base weights. Freeze the base of layers with LoRA, or "
                "merge an earlier adapter that changed it (--adapter-path, --create-new-adapter)."
            )
        names.append(name)
    return names


@dataclass(frozen=True)
class AdapterShare:
    """What one stage saves of the adapters: copies on the host, which training does not change.

    Attributes:
        depth: adapters stacked on the layer that has most.
        tensors, facts: level -> tensors by name in the file, what `peft_config` takes.
        modules: modules that were trained whole.
        token_ids: module -> ids of the new tokens whose rows are among the tensors.
        kinds: level -> see `adapter_kinds`.
    """

    stage: int
    depth: int
    dropout: float
    tensors: dict[int, dict[str, torch.Tensor]]
    facts: dict[int, dict[str, tuple[int, float, bool]]]
    modules: list[str]
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    kinds: dict[int, set[str]] = field(default_factory=dict)


def adapter_share(stage: nn.Module, *, claimed: set[str]) -> AdapterShare:
    """Copies this stage's share of every adapter.

    Args:
        claimed: trained names that an earlier stage saves.
    """
    stacks = lora_stacks(stage)
    depth = max((len(wrappers) for wrappers in stacks.values()), default=0)
    trained = trained_names(stage)
    extras = [name for name in trained if name not in claimed]
    rows = rows_share(stage, trained=trained)
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    tensors, facts, kinds = {}, {}, {}
    for level in _levels(depth):
        chosen = None if level == SUM else level
        kinds[level] = adapter_kinds(stage, level=chosen)
        state = {
            name: value.to("cpu") for name, value in adapter_tensors(stage, level=chosen).items()
        }
        if level in (SUM, depth - 1):
            for name in extras:
                state[PEFT_PREFIX + name] = parameters[name].detach().to("cpu", copy=True)
            for module, (_, values) in rows.items():
                state[PEFT_PREFIX + module + ROWS_OF_PEFT] = values
        tensors[level], facts[level] = state, adapter_facts(stage, level=chosen)
    dropout = 0.0
    for wrappers in stacks.values():
        dropout = getattr(wrappers[-1].lora.dropout, "p", 0.0)
    modules = sorted({name.rpartition(".")[0] for name in extras})
    token_ids = {module: ids for module, (ids, _) in rows.items()}
    return AdapterShare(stage.stage, depth, dropout, tensors, facts, modules, token_ids, kinds)


def write_part(share: AdapterShare, folder: Path) -> dict[str, object]:
    """Writes a stage's share; returns what `merge_parts` needs to know."""
    files = {}
    for level, tensors in share.tensors.items():
        if tensors:
            files[level] = f"part-{share.stage:05d}-{level}.safetensors"
            write_tensors(tensors, folder / files[level])
    return {
        "depth": share.depth,
        "dropout": share.dropout,
        "facts": share.facts,
        "modules": share.modules,
        "token_ids": share.token_ids,
        "kinds": share.kinds,
        "files": files,
    }


def _levels(depth: int) -> list[int]:
    return [SUM, *range(depth)] if depth > 1 else [SUM]


def merge_parts(
    parts: list[dict[str, object]], folder: Path, *, base: str, model_class: str
) -> None:
    """Makes one adapter of the stages' parts, and one per level where adapters are stacked."""
    depth = max(part["depth"] for part in parts)
    modules = _outermost(_without_adapters_inside(parts))
    token_ids = {module: ids for part in parts for module, ids in part["token_ids"].items()}
    for level in _levels(depth):
        chaos.point("file")
        target = folder if level == SUM else folder / STACK_FOLDER / str(level)
        target.mkdir(parents=True, exist_ok=True)
        tensors, facts = {}, {}
        for part in parts:
            facts.update(part["facts"].get(level, {}))
            if level in part["files"]:
                tensors.update(load_file(folder / part["files"][level]))
        has_extras = level in (SUM, depth - 1)
        config = peft_config(
            facts,
            base=base,
            dropout=max(part["dropout"] for part in parts),
            modules_to_save=modules if has_extras else [],
            token_ids=token_ids if has_extras else None,
            kinds={kind for part in parts for kind in part["kinds"].get(level, ())},
            task=task_of(model_class),
        )
        write_tensors(dict(sorted(tensors.items())), target / ADAPTER_FILE)
        (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for part in parts:
        chaos.point("file")
        for file in part["files"].values():
            (folder / file).unlink()


def _without_adapters_inside(parts: list[dict[str, object]]) -> list[str]:
    """Modules that were trained whole, sorted.

    A parameter that lies on the base model itself (the line end of LLaVA-NeXT) has no module that
    peft could replace; it is in the file, and peft reads it by its name alone.
    """
    adapted = {name for part in parts for facts in part["facts"].values() for name in facts}
    return [
        module
        for module in sorted({name for part in parts for name in part["modules"]})
        if not any(name.startswith(module + ".") for name in adapted)
    ]


def _outermost(modules: list[str]) -> list[str]:
    """Without modules that lie inside another one of the list, which has their weights too."""
    return [
        name
        for name in modules
        if not any(name != other and name.startswith(other + ".") for other in modules)
    ]
