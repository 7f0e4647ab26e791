"""One stage's share of a Hugging Face model folder: tensors with names as on disk, shards, config.

Knows no ranks; `save.py` puts the stages together.
"""

import copy
import json
from pathlib import Path

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from stageline.checkpoint.files import INDEX_FILE, SINGLE_FILE
from stageline.checkpoint.host_copies import HostCopies
from stageline.modules.lora import unwrapped
from stageline.modules.methods import turn_on_cache
from stageline.modules.new_rows import fold_rows, is_row_name

Shard = dict[str, torch.Tensor]
WEIGHTS = "weights"


@torch.no_grad()
def disk_state(stage: nn.Module, claimed: set[str]) -> dict[str, torch.Tensor]:
    """What a stage saves: name on disk -> tensor, without adapters.

    Args:
        claimed: names in memory that an earlier stage saves: a tied weight is saved once.

    Tensors are those of the stage or views of them, wherever the names on disk allow it.
    """
    fold_rows(stage)
    with unwrapped(stage):
        state = stage.state_dict(keep_vars=True)
        state = {name: value for name, value in state.items() if not is_row_name(name)}
        taken = {id(value) for name, value in state.items() if name in claimed}
        own = {}
        for name, value in state.items():
            if id(value) not in taken:
                taken.add(id(value))
                own[name] = value.detach()
        if stage.whole is None:
            key_map = stage.get_key_map_without_last_lora()
            return {key_map[name]: value for name, value in own.items()}
        for name in stage.whole._keys_to_ignore_on_save or ():
            own.pop(name, None)
        # the public save_pretrained writes nothing on ranks other than 0
        return revert_weight_conversion(stage.whole, own)


def copy_state(
    state: dict[str, torch.Tensor], stage: nn.Module, copies: HostCopies
) -> dict[str, torch.Tensor]:
    """A state on the host that training does not change; what is no view of a weight stays."""
    weights = {
        value.untyped_storage().data_ptr()
        for value in (*stage.parameters(), *stage.buffers())
        if value.device.type == "cpu"
    }

    def is_safe(value: torch.Tensor) -> bool:
        return value.device.type == "cpu" and value.untyped_storage().data_ptr() not in weights

    return {
        name: value if is_safe(value) else copies.copy(f"{WEIGHTS}/{name}", value)
        for name, value in state.items()
    }


def split_state(state: dict[str, torch.Tensor], max_bytes: int) -> list[Shard]:
    """Cuts a state into shards of at most `max_bytes`; a greater tensor is alone in its shard."""
    shards: list[Shard] = []
    size = 0
    for name in sorted(state):
        tensor = state[name]
        if not shards or size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def shard_name(number: int, count: int) -> str:
    """The file name of a shard, counted from 1, as the library writes it."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, written: dict[str, tuple[dict, dict[str, int]]]) -> None:
    """Writes which file has which tensor.

    Args:
        written: file -> (facts with its size, tensor name -> number of elements).
    """
    metadata = {
        "total_parameters": sum(sum(sizes.values()) for _, sizes in written.values()),
        "total_size": sum(facts["size"] for facts, _ in written.values()),
    }
    weight_map = {name: file for file, (_, sizes) in written.items() for name in sizes}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def save_config(stage: nn.Module, folder: Path) -> None:
    """Writes config.json, what generation needs, and the code of a model that brings its own."""
    if stage.config is None:
        return
    config = copy.deepcopy(stage.config)
    if getattr(stage, "uses_cache", False):
        turn_on_cache(config)
    if stage.whole is not None:
        config.architectures = [type(stage.whole).__name__]
        config.dtype = str(stage.whole.dtype).removeprefix("torch.")
        if stage.whole.is_remote_code():
            custom_object_save(stage.whole, folder, config=config)
        if stage.whole.can_generate():
            stage.whole.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)


def save_processor(processor: object | None, folder: Path) -> None:
    """Saves a tokenizer or processor; one that cannot save itself whole, by its parts."""
    if processor is None:
        return
    try:
        processor.save_pretrained(folder)
    except Exception:
        # a processor of a model with video has a part that exists with torchvision only
        parts = [getattr(processor, name, None) for name in ("tokenizer", "image_processor")]
        if not any(part is not None for part in parts):
            raise
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)
