"""Write one stage's share of a Hugging Face model folder: tensors named as on disk, config."""

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.files import INDEX_FILE, SINGLE_FILE, write_tensors
from stageline.checkpoint.layout import file_facts
from stageline.device import is_accelerator
from stageline.model_folder import read_json
from stageline.modules.lora import is_lora_name, lora_stacks, strip_lora, unwrapped
from stageline.modules.lora_layer import restored_weight
from stageline.modules.new_rows import fold_rows, is_row_name
from stageline.modules.stage_names import names_on_disk
from stageline.stage import Stage, default_loader


class HostCopies:
    """A place on the host for each tensor that is saved.

    Fresh memory at each save would take longer than the copying. Below a GPU it is page-locked,
    which is twice as fast, and copies are there after `wait`. They must be written before the next
    ones are made.
    """

    def __init__(self) -> None:
        self._places: dict[str, torch.Tensor] = {}
        self._coming: set[torch.device] = set()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy that stays as it is until `name` is copied again."""
        is_queued = is_accelerator(tensor.device)
        place = self._places.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_queued)
            self._places[name] = place
        if is_queued:
            self._coming.add(tensor.device)
        return place.copy_(tensor.detach(), non_blocking=is_queued)

    def wait(self) -> None:
        """Wait for all copies; their sources may change from then on."""
        for device in self._coming:
            torch.get_device_module(device).current_stream(device).synchronize()
        self._coming.clear()


Place = tuple[nn.Module, str]  # a module and the name of its parameter


@contextmanager
def gathered(stages: Iterable[nn.Module], *, keep: bool) -> Iterator[None]:
    """While open, sharded parameters are whole tensors on the host; every replica calls this.

    They come in the type that the model computes in. Module by module is put together on the
    device, so at no time is more of a stage there than one of them.

    Args:
        keep: whether this replica wants them; else its stages stay as they are.
    """
    modules = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.reshard()  # an evaluation may have left them whole
    before: dict[Place, nn.Parameter] = {}
    copies: dict[Place, nn.Parameter] = {}
    for module in modules:
        sharded: dict[Place, nn.Parameter] = {
            (child, name): parameter
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and isinstance(parameter, DTensor)
        }
        module.unshard()
        if keep:
            before.update(sharded)
            copies.update(_copies(sharded))
        module.reshard()
    try:
        for (child, name), parameter in copies.items():
            child._parameters[name] = parameter
        yield
    finally:
        for child, name in copies:
            child._parameters[name] = before[child, name]


@torch.no_grad()
def _copies(sharded: dict[Place, nn.Parameter]) -> dict[Place, nn.Parameter]:
    """Copies of what is whole now; a weight of two modules stays one."""
    made: dict[int, nn.Parameter] = {}
    copies = {}
    for (module, name), share in sharded.items():
        whole = module._parameters[name]
        if whole is None or isinstance(whole, DTensor):
            continue  # its module's turn comes
        if id(whole) not in made:
            copy = whole.detach().to("cpu", copy=True)
            made[id(whole)] = nn.Parameter(copy, requires_grad=share.requires_grad)
        copies[module, name] = made[id(whole)]
    return copies


Shard = dict[str, torch.Tensor]
WEIGHTS = "weights"


@torch.no_grad()
def disk_state(stage: Stage, claimed: set[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that a stage saves, by name on disk, without adapters.

    Args:
        claimed: names in memory that an earlier stage saves: a tied weight is saved once.

    Tensors are those of the stage or views of them, wherever the names on disk allow it.
    """
    fold_rows(stage)
    before_pissa = {  # weights that PiSSA took a part of, whole again: adapters fit these
        f"{name}.weight": restored_weight(*stack[-1])
        for name, stack in lora_stacks(stage).items()
        if stack[-1].lora.taken is not None
    }
    if stage.whole is None:
        on_disk = names_on_disk(stage).items()
        key_map = {strip_lora(n): strip_lora(d) for n, d in on_disk if not is_lora_name(n)}
    with unwrapped(stage):
        state = stage.state_dict(keep_vars=True) | before_pissa
        state = {name: value for name, value in state.items() if not is_row_name(name)}
        taken = {id(value) for name, value in state.items() if name in claimed}
        own = {}
        for name, value in state.items():
            if id(value) not in taken:
                taken.add(id(value))
                own[name] = value.detach()
        if stage.whole is None:
            return {key_map[name]: value for name, value in own.items()}
        for name in stage.whole._keys_to_ignore_on_save or ():
            own.pop(name, None)
        # the public save_pretrained writes nothing on ranks other than 0
        return revert_weight_conversion(stage.whole, own)


def copy_state(
    state: dict[str, torch.Tensor], stage: nn.Module, copies: HostCopies
) -> dict[str, torch.Tensor]:
    """Copy a state to the host, apart from training; tensors that are not views of weights stay."""
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
    """Cut a state into shards of at most `max_bytes`; a greater tensor is alone in its shard."""
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
    """The file name of a shard, counted from 1, as transformers writes it."""
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_shard(shard: Shard, path: Path) -> tuple[dict, dict[str, int]]:
    """Write a file of weights; its facts for a manifest, and the number of elements by name."""
    write_tensors(shard, path)
    return file_facts(path), {name: tensor.numel() for name, tensor in shard.items()}


def write_index(folder: Path, written: dict[str, tuple[dict, dict[str, int]]]) -> None:
    """Write which file has which tensor.

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


def save_config(stage: Stage, folder: Path) -> None:
    """Write config.json, what generation needs, and the code of a model that brings its own."""
    if stage.config is None:
        return
    config = copy.deepcopy(stage.config)
    for name in getattr(stage, "cached_configs", ()):  # training turns it off
        (getattr(config, name) if name else config).use_cache = True
    if stage.whole is not None:
        config.architectures = [type(stage.whole).__name__]
        config.dtype = str(stage.whole.dtype).removeprefix("torch.")
        if stage.whole.is_remote_code():
            # annotated for a dict, it takes a configuration, which transformers itself gives it
            custom_object_save(stage.whole, folder, config=config)  # type: ignore[arg-type]
        if stage.whole.can_generate():
            stage.whole.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)


def save_stop_ids(processor: Any, folder: Path) -> None:
    """Add to generation_config.json the tokens that end an answer, for all who read it."""
    path = folder / GENERATION_CONFIG_NAME
    tokenizer = getattr(processor, "tokenizer", processor)
    if getattr(tokenizer, "eos_token_id", None) is None or not path.is_file():
        return
    settings = read_json(path)
    before = settings.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    ends = default_loader().stop_ids(known, processor)
    more = [token for token in ends if token not in known]
    if more:
        settings["eos_token_id"] = [*known, *more]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
