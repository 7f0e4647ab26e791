"""The adapters of a model as tensors and configuration of `peft`. Knows no files."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from stageline.checkpoint.adapter import PEFT_PREFIX
from stageline.checkpoint.adapter_rows import INDICES
from stageline.modules.lora import innermost, lora_stacks
from stageline.modules.lora_layer import MAGNITUDE

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
        if layers[-1].use_dora:
            magnitude = layers[-1].lora_magnitude_vector.detach().clone()
            tensors[f"{PEFT_PREFIX}{name}.{MAGNITUDE}"] = magnitude
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
