"""Writes an adapter folder: each stage its part, then all parts as one. Knows no ranks."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from stageline.checkpoint.adapter import (
    PEFT_PREFIX,
    STACK_FOLDER,
    adapter_facts,
    adapter_tensors,
    peft_config,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE
from stageline.errors import UserError
from stageline.modules.lora import WRAPPED, is_lora_name, lora_stacks, strip_lora

SUM = -1  # stands for all levels as one adapter


def trained_names(stage: nn.Module) -> list[str]:
    """Parameters besides the adapters that this stage trains; a tied one under each name.

    Raises:
        UserError: a weight below an adapter is trained: an adapter folder has no place for it.
    """
    names = []
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or is_lora_name(name):
            continue
        if WRAPPED in name.split("."):
            raise UserError(
                f"{strip_lora(name)} is trained and has a LoRA as well, one of both was expected: "
                "an adapter folder holds no base weights. Freeze the base of layers with LoRA."
            )
        names.append(name)
    return names


def write_parts(stage: nn.Module, folder: Path, *, claimed: set[str]) -> dict[str, object]:
    """Writes this stage's share of every adapter; returns what `merge_parts` needs to know.

    Args:
        claimed: trained names that an earlier stage writes.
    """
    stacks = lora_stacks(stage)
    depth = max((len(wrappers) for wrappers in stacks.values()), default=0)
    extras = [name for name in trained_names(stage) if name not in claimed]
    part = {"stage": stage.stage, "depth": depth, "files": {}, "facts": {}, "dropout": 0.0}
    for level in [SUM, *range(depth)] if depth > 1 else [SUM]:
        chosen = None if level == SUM else level
        tensors = adapter_tensors(stage, level=chosen)
        if level in (SUM, depth - 1):
            parameters = dict(stage.named_parameters(remove_duplicate=False))
            tensors |= {PEFT_PREFIX + n: parameters[n].detach().clone() for n in extras}
        part["facts"][level] = adapter_facts(stage, level=chosen)
        if tensors:
            part["files"][level] = f"part-{stage.stage:05d}-{level}.safetensors"
            save_file(tensors, folder / part["files"][level])
    for wrappers in stacks.values():
        part["dropout"] = getattr(wrappers[-1].lora.dropout, "p", 0.0)
    part["modules"] = sorted({name.rpartition(".")[0] for name in extras})
    return part


def merge_parts(
    parts: list[dict[str, object]], folder: Path, *, base: str, model_class: str
) -> None:
    """Makes one adapter of the stages' parts, and one per level where adapters are stacked."""
    depth = max(part["depth"] for part in parts)
    modules = _outermost(sorted({name for part in parts for name in part["modules"]}))
    for level in [SUM, *range(depth)] if depth > 1 else [SUM]:
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
            is_causal_lm=model_class.endswith(("ForCausalLM", "LMHeadModel")),
        )
        save_file(dict(sorted(tensors.items())), target / ADAPTER_FILE, metadata={"format": "pt"})
        (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for part in parts:
        for file in part["files"].values():
            (folder / file).unlink()


def _outermost(modules: list[str]) -> list[str]:
    """Without modules that lie inside another one of the list, which has their weights too."""
    return [
        name
        for name in modules
        if not any(name != other and name.startswith(other + ".") for other in modules)
    ]
