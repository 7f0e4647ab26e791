"""Prepares a check on rank 0: the weights that all stages load, and the whole model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.checking.batches import MicroBatch
from stageline.checking.coverage import tied_names
from stageline.checking.reference import (
    add_plain_lora,
    run_library_model,
    run_stage_model,
    train_same_parameters,
)
from stageline.checking.whole_model import (
    Build,
    Source,
    cut_layers,
    has_processor,
    is_plain,
    library_class,
    load_library_model,
    read_config,
    save_config,
    save_random_library_model,
    save_random_part,
    save_stand_in_tokenizer,
    weights_folder,
)
from stageline.checkpoint.files import weight_files
from stageline.errors import UserError
from stageline.modules.lora_layer import LoRALayer
from stageline.modules.lora_start import name_seed

ReferenceKind = Literal["auto", "transformers", "part"]


@dataclass(frozen=True)
class Preparation:
    """What rank 0 tells the others before a stage is built.

    Attributes:
        files: names on disk.
        is_library: the whole model is the library's class, not the part on one stage.
    """

    source: Source
    config: PretrainedConfig
    files: tuple[str, ...]
    is_library: bool
    notes: tuple[str, ...]


@dataclass
class WholeModel:
    """The model that a split is compared with, on rank 0.

    Attributes:
        trains: name -> whether the part trains it on one stage.
        tied: names of weights that it uses under several names.
        passed_over: patterns of keys on disk that the library does not read.
    """

    model: nn.Module
    forward: Callable[[nn.Module, MicroBatch], torch.Tensor]
    trains: dict[str, bool]
    tied: set[str]
    passed_over: Sequence[str]


def prepare(
    source: Source,
    folder: Path,
    *,
    layers: int | None,
    reference: ReferenceKind,
    build: Build,
    seed: int,
    trust_remote_code: bool,
) -> Preparation:
    """Finds or makes the weights.

    Args:
        source: the paths that the user gave.
        folder: for what has to be made; all ranks read it.
        build: (stage, num_stages, source) -> a stage model.

    Raises:
        UserError: there is no config, or no such reference.
    """
    origin = source.config_path or source.model_path
    config = read_config(origin, trust_remote_code=trust_remote_code)
    auto_class = _choose_class(config, reference, trust_remote_code=trust_remote_code)
    processor, notes = _find_processor(source, folder, trust_remote_code=trust_remote_code)
    is_own = not notes
    assert origin is not None  # read_config has refused that
    if layers is not None:
        before = cut_layers(config, layers)
        notes.append(
            f"the model was cut from {before} to {layers} layers (--check-layers); its weights are "
            "random, a checkpoint was not read"
        )
    is_random = layers is not None or source.model_path is None
    if is_random:
        save_config(config, origin, folder)
        source = Source(str(folder), str(folder), processor, is_own)
        if auto_class is not None:
            save_random_library_model(
                auto_class, config, folder, seed=seed, trust_remote_code=trust_remote_code
            )
        else:
            without = Source(str(folder), None, processor)
            save_random_part(build(stage=0, num_stages=1, source=without), folder, seed=seed)
        if layers is None:
            notes.append("no --model-path: the weights are random")
    else:
        source = Source(source.config_path, source.model_path, processor, is_own)
    checkpoint = weights_folder(source.model_path)
    if auto_class is not None and not is_plain(checkpoint):
        auto_class = None
        notes.append("the checkpoint has LoRA names in it, which the library can't read")
    files = tuple(weight_files(checkpoint))
    return Preparation(source, config, files, auto_class is not None, tuple(notes))


def _find_processor(
    source: Source, folder: Path, *, trust_remote_code: bool
) -> tuple[str, list[str]]:
    """The user's tokenizer or processor, or a stand-in and a note that says so."""
    path = source.processor_path or source.model_path or source.config_path or ""
    if has_processor(path, trust_remote_code=trust_remote_code):
        return path, []
    # in a folder of its own: beside a config the library would want the model's processor
    stand_in = folder / "tokenizer"
    save_stand_in_tokenizer(stand_in)
    return str(stand_in), [f"{path} holds no tokenizer or processor: token ids are random"]


def _choose_class(
    config: PretrainedConfig, reference: ReferenceKind, *, trust_remote_code: bool
) -> Any:
    if reference == "part":
        return None
    auto_class = library_class(config, trust_remote_code=trust_remote_code)
    if auto_class is None and reference == "transformers":
        raise UserError(
            f"--check-reference transformers: the library has no model for "
            f"{config.model_type!r}. One was expected, to compare the split with: leave the option "
            "out, and the part on one stage is taken."
        )
    return auto_class


def load_whole(
    preparation: Preparation, *, build: Build, seed: int, trust_remote_code: bool
) -> WholeModel:
    """Builds the part on one stage and, where the library knows the model, that in its place.

    Raises:
        CheckpointMismatch: names or shapes in the checkpoint are not the part's.
    """
    single = build(stage=0, num_stages=1, source=preparation.source)
    start_lora(single, seed=seed)
    trains = {name: parameter.requires_grad for name, parameter in single.named_parameters()}
    shared = set(getattr(single, "shared_names", ()))
    if not preparation.is_library:
        unused = getattr(single, "unused_names", ())
        passed_over = tuple("^" + re.escape(beginning) for beginning in unused)
        return WholeModel(single, run_stage_model, trains, tied_names(single) | shared, passed_over)
    inner = getattr(single, "whole", None)
    whole = load_library_model(
        library_class(preparation.config, trust_remote_code=trust_remote_code),
        preparation.config,
        weights_folder(preparation.source.model_path),
        attn_implementation=None if inner is None else inner.config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    passed_over = whole._keys_to_ignore_on_load_unexpected or ()
    add_plain_lora(whole, single)
    train_same_parameters(whole, single)
    whole.train()
    tied = tied_names(whole) | shared
    return WholeModel(whole, run_library_model, trains, tied, tuple(passed_over))


@torch.no_grad()
def start_lora(model: nn.Module, *, seed: int) -> None:
    """Gives adapters that start at zero random values by name: at zero they hide what A does."""
    for name, module in model.named_modules():
        if not isinstance(module, LoRALayer) or bool(module.lora_B.weight.any()):
            continue
        weight = module.lora_B.weight
        generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_B.weight"))
        weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
