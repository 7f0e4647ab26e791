"""Writes an adapter folder: each stage its part, then all parts as one. Knows no ranks."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline import chaos
from stageline.checkpoint.adapter import (
    INDICES,
    PEFT_PREFIX,
    ROWS_OF_PEFT,
    STACK_FOLDER,
    rows_share,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, write_tensors
from stageline.checkpoint.plain_model import task_of
from stageline.errors import UserError
from stageline.modules.lora import WRAPPED, innermost, is_lora_name, lora_stacks, strip_lora
from stageline.modules.lora_layer import MAGNITUDE
from stageline.modules.new_rows import is_row_name
from stageline.stage import Stage

# -- the adapters of a model as tensors and configuration of `peft`. Knows no files ---------------

KINDS = ("use_dora", "use_rslora")


def adapter_tensors(model: nn.Module, *, level: int | None) -> dict[str, torch.Tensor]:
    """The adapters of a model under `peft` names.

    Args:
        level: which of stacked ones, 0 the innermost; None: all as one, ranks side by side.
    """
    tensors = {}
    for name, wrappers in lora_stacks(model).items():
        layers = [wrapper.lora for wrapper in wrappers]
        if level is not None:
            layers = layers[level : level + 1]
        if not layers:
            continue
        last = layers[-1].scale
        downs = [layer.lora_A.weight.detach() for layer in layers]
        ups = [layer.lora_B.weight.detach() * (layer.scale / last) for layer in layers]
        if layers[-1].taken is not None:  # the file is for the weights before PiSSA
            down, up = (value.to(downs[0]) for value in layers[-1].taken)
            downs, ups = [*downs, down], [*ups, -up]
        a, b = torch.cat(downs), torch.cat(ups, dim=1)
        magnitude = layers[-1].lora_magnitude_vector
        if magnitude is not None:
            tensors[f"{PEFT_PREFIX}{name}.{MAGNITUDE}"] = magnitude.detach().clone()
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = b.contiguous()
    return tensors


def adapter_facts(model: nn.Module, *, level: int | None) -> dict[str, tuple[int, float, bool]]:
    """Module name -> (rank, alpha, whether the layer keeps its weight transposed)."""
    facts = {}
    for name, wrappers in lora_stacks(model).items():
        layers = [wrapper.lora for wrapper in wrappers]
        if level is not None:
            layers = layers[level : level + 1]
        if layers:
            rank = sum(layer.rank * (1 if layer.taken is None else 2) for layer in layers)
            is_transposed = isinstance(innermost(wrappers[0]), Conv1D)
            facts[name] = (rank, layers[-1].scale * rank, is_transposed)
    return facts


def adapter_kinds(model: nn.Module, *, level: int | None) -> set[str]:
    """Which of `use_dora` and `use_rslora` the adapters of a level have."""
    kinds = set()
    for wrappers in lora_stacks(model).values():
        for wrapper in wrappers if level is None else wrappers[level : level + 1]:
            layer = wrapper.lora
            kinds |= {kind for kind in KINDS if getattr(layer, kind)}
    return kinds


def peft_config(
    facts: dict[str, tuple[int, float, bool]],
    *,
    base: str,
    dropout: float,
    modules_to_save: list[str],
    task: str | None,
    token_ids: dict[str, list[int]] | None = None,
    kinds: Iterable[str] = (),
) -> dict[str, object]:
    """The content of adapter_config.json.

    Args:
        facts: of all stages, see `adapter_facts`.
        base: the folder of the frozen model.
        modules_to_save: modules that were trained whole.
        task: what peft calls the kind of model; see tasks.py.
        token_ids: module -> ids of the new tokens whose rows the adapter holds.
        kinds: see `adapter_kinds`.
    """
    if "use_rslora" in kinds:  # the scale is alpha / sqrt(rank) then, and stays what it is
        facts = {n: (r, round(alpha / r**0.5, 9), t) for n, (r, alpha, t) in facts.items()}
    ordered = sorted(facts)
    rank, alpha, _ = facts[ordered[0]]
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": any(transposed for _, _, transposed in facts.values()),
        "target_modules": ordered,
        "modules_to_save": modules_to_save or None,
        "rank_pattern": {re.escape(n): facts[n][0] for n in ordered if facts[n][0] != rank},
        "alpha_pattern": {re.escape(n): facts[n][1] for n in ordered if facts[n][1] != alpha},
        **({INDICES: token_ids} if token_ids else {}),
        **dict.fromkeys(sorted(kinds), True),
    }


# -------------------------------------------------------------------------------------------------

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
                "merge an earlier adapter that changed it (`adapter_path`, `create_new_adapter`)."
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


def adapter_share(stage: Stage, *, claimed: set[str]) -> AdapterShare:
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


class AdapterPart(TypedDict):
    """What `merge_parts` knows of a stage's share: as `AdapterShare`, with files for tensors."""

    depth: int
    dropout: float
    facts: dict[int, dict[str, tuple[int, float, bool]]]
    modules: list[str]
    token_ids: dict[str, list[int]]
    kinds: dict[int, set[str]]
    files: dict[int, str]


def write_part(share: AdapterShare, folder: Path) -> AdapterPart:
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


def merge_parts(parts: list[AdapterPart], folder: Path, *, base: str, model_class: str) -> None:
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


def _without_adapters_inside(parts: list[AdapterPart]) -> list[str]:
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
