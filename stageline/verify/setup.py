"""Prepares a check on rank 0: the weights that all stages load, and the whole model.

The whole model is the library's own class where it has one. A model that is cut or has no
checkpoint gets random weights in a folder, so that stages load them as they load any checkpoint.
"""

import contextlib
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from stageline.checkpoint.adapter import base_of
from stageline.checkpoint.files import SINGLE_FILE, find_checkpoint, weight_files
from stageline.checkpoint.load import quiet
from stageline.checkpoint.plain_model import save_whole
from stageline.data.text.processor import load_processor
from stageline.errors import CheckpointError, UserError, spelled
from stageline.model_folder import load_config, refused_build
from stageline.modules.lora import WRAPPED
from stageline.modules.lora_layer import LoRALayer, name_seed
from stageline.modules.stage_names import names_on_disk
from stageline.verify.batches import MicroBatch
from stageline.verify.reference import (
    Output,
    add_plain_lora,
    run_library_model,
    run_stage_model,
    train_same_parameters,
)

if TYPE_CHECKING:
    from stageline.stages.base import StageModel
    from stageline.verify.scaled_copy import ScaledCopy

Build = Callable[..., "StageModel"]


@dataclass(frozen=True)
class ModelSource:
    """Paths that every stage is built from.

    Attributes:
        has_processor: the last one holds the model's own, not a stand-in.
    """

    config_path: str | None
    model_path: str | None
    processor_path: str | None
    has_processor: bool = True


def cut_layers(config: PretrainedConfig, layers: int) -> int:
    """Shortens the language model to its first layers, in place; returns how many there were.

    Lists with an entry a layer (`layer_types`) are cut too. A vision tower stays.
    """
    text = config.get_text_config(decoder=True)
    before = text.num_hidden_layers
    if layers > before:
        raise UserError(
            f"`check.layers` {layers} is more than the {before} layers of the model: it cuts a "
            f"model, it can't lengthen one. Give {before} or less."
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return before


def library_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """The library's Auto class that builds this model, or None where it knows none."""
    choices = {
        "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageTextToText": transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    names = sorted(choices, reverse=has_images(config))
    remote = getattr(config, "auto_map", None) or {}
    for name in names:
        if type(config) in choices[name] or (trust_remote_code and name in remote):
            return getattr(transformers, name)
    return None


def has_images(config: PretrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def save_config(config: PretrainedConfig, origin: str, folder: Path) -> None:
    """Writes config.json, with the Python files that lie beside the original."""
    config.save_pretrained(folder)
    path = Path(origin)
    for file in (path if path.is_dir() else path.parent).glob("*.py"):
        shutil.copy(file, folder)


def _save_random_weights(
    auto_class: Any,
    config: PretrainedConfig,
    source: ModelSource,
    build: Build,
    *,
    seed: int,
    **code: bool,
) -> None:
    """Saves the library's model, or the part on one stage, of random weights."""
    folder = Path(source.model_path or "")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if auto_class is not None:
            try:
                whole = auto_class.from_config(config, dtype=torch.float32, **code)
            except Exception as error:  # the library raises what it likes
                raise refused_build(config, auto_class, error) from error
            _move_constants(whole)
            save_whole(whole, folder)
            return
        part = build(stage=0, num_stages=1, source=replace(source, model_path=None))
        _move_constants(part)
    key_map = names_on_disk(part)
    state = {
        key_map[name]: value.detach().clone().contiguous()
        for name, value in part.state_dict().items()
        if name in key_map
    }
    save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})


@torch.no_grad()
def _move_constants(model: nn.Module) -> None:
    """Moves norms and biases from the 0 and 1 they start at, which hide a swap or a loss."""
    for parameter in model.parameters():
        if parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.05)


ReferenceKind = Literal["auto", "transformers", "part"]


@dataclass(frozen=True)
class Preparation:
    """What rank 0 tells the others before a stage is built.

    Attributes:
        is_library: the whole model is the library's class, not the part on one stage.
    """

    source: ModelSource
    is_library: bool
    notes: tuple[str, ...]
    trust_remote_code: bool = False

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """Read by each rank: the class of a model's own code is not known to another process."""
        path = self.source.config_path or self.source.model_path
        return load_config(str(path), trust_remote_code=self.trust_remote_code)


@dataclass
class WholeModel:
    """The model that a split is compared with, on rank 0."""

    model: nn.Module
    forward: Callable[[nn.Module, MicroBatch], Output]


def prepare(
    source: ModelSource,
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
    if origin is None:
        raise UserError(
            "neither `model_path` nor `config_path` came: the model's config.json must lie in one "
            "of them, because its split is what is checked. Give the same as for training."
        )
    config = load_config(origin, trust_remote_code=trust_remote_code)
    auto_class = _choose_class(config, reference, trust_remote_code=trust_remote_code)
    processor, notes = _find_processor(source, folder, trust_remote_code=trust_remote_code)
    is_own = not notes
    if layers is not None:
        before = cut_layers(config, layers)
        cut = f"the model was cut from {before} to {layers} layers (`check.layers`)"
        notes.append(spelled(f"{cut}; its weights are random, a checkpoint was not read"))
    is_random = layers is not None or source.model_path is None
    if is_random:
        save_config(config, origin, folder)
        # code of the folder is read here first: ranks that copy it at once disturb each other
        config = load_config(folder, trust_remote_code=trust_remote_code)
        source = ModelSource(str(folder), str(folder), processor, is_own)
        _save_random_weights(
            auto_class, config, source, build, seed=seed, trust_remote_code=trust_remote_code
        )
        if layers is None:
            notes.append(spelled("no `model_path`: the weights are random"))
    else:
        source = ModelSource(source.config_path, source.model_path, processor, is_own)
    names = weight_files(_weights_folder(source), fetches=False)
    if auto_class is not None and any(WRAPPED in name.split(".") for name in names):
        auto_class = None
        notes.append("the checkpoint has LoRA names in it, which the library can't read")
    return Preparation(source, auto_class is not None, tuple(notes), trust_remote_code)


def _weights_folder(source: ModelSource) -> Path:
    """The checkpoint that holds the model's weights; of an adapter, its base."""
    assert source.model_path is not None  # a model without one has been given a folder
    return base_of(find_checkpoint(source.model_path))


def _find_processor(
    source: ModelSource, folder: Path, *, trust_remote_code: bool
) -> tuple[str, list[str]]:
    """The user's tokenizer or processor, or a stand-in and a note that says so."""
    path = source.processor_path or source.model_path or source.config_path or ""
    try:
        load_processor(path, trust_remote_code=trust_remote_code)
        return path, []
    except CheckpointError:
        raise  # there is one, and it is broken
    except (UserError, OSError, ValueError):
        pass
    # one token: parts load a tokenizer, a check on random ids needs none. In a folder of its own:
    # beside a config the library would want the model's processor
    stand_in = folder / "tokenizer"
    backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(stand_in)
    return str(stand_in), [f"{path} holds no tokenizer or processor: token ids are random"]


def _choose_class(
    config: PretrainedConfig, reference: ReferenceKind, *, trust_remote_code: bool
) -> Any:
    if reference == "part":
        return None
    auto_class = library_class(config, trust_remote_code=trust_remote_code)
    if auto_class is None and reference == "transformers":
        raise UserError(
            f"`check.reference` transformers: the library has no model for "
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
    if not preparation.is_library:
        return WholeModel(single, run_stage_model)
    auto_class = library_class(preparation.config, trust_remote_code=trust_remote_code)
    checkpoint = _weights_folder(preparation.source)
    options: dict[str, Any] = {}
    inner = getattr(single, "whole", None)
    if inner is not None:
        options["attn_implementation"] = inner.config._attn_implementation
    config = preparation.config
    if checkpoint.is_file():  # not the other weights of its folder
        config = copy.deepcopy(config)
        config.transformers_weights = checkpoint.name
    whole: Any = auto_class.from_pretrained(
        checkpoint if checkpoint.is_dir() else checkpoint.parent,
        config=config,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        **options,
    )
    add_plain_lora(whole, single)
    train_same_parameters(whole, single)
    whole.train()
    return WholeModel(whole, run_library_model)


@torch.no_grad()
def start_lora(model: nn.Module, *, seed: int) -> None:
    """Gives adapters that start at zero random values by name: at zero they hide what A does."""
    for name, module in model.named_modules():
        if not isinstance(module, LoRALayer) or bool(module.lora_B.weight.any()):
            continue
        weight = module.lora_B.weight
        generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_B.weight"))
        weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))


@contextlib.contextmanager
def copies(
    split: "ScaledCopy",
    small: PretrainedConfig,
    partition: Sequence[int] | None = None,
    vision_stages: int = 0,
) -> Iterator[Callable[..., Any]]:
    """While open: (stage, number of stages, dtype) -> a stage of a scaled-down copy, on the CPU."""
    with quiet(), tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
        save_config(small, str(split.config_path), Path(name))

        def build(stage: int, count: int, dtype: torch.dtype, **changes: Any) -> nn.Module:
            alone = count == 1
            options = dict(split.options)
            if vision_stages and not alone:
                options["vision_stages"] = vision_stages
            fixed = {
                "config_path": name,
                "processor_path": None,
                "checkpoint_path": None,
                "stage": stage,
                "num_stages": count,
                "partition": None if alone else partition,
                "dtype": dtype,
                "device": "cpu",
                "is_piece": True,
                "trust_remote_code": split.trust_remote_code,
            }
            return split.part(**{**options, **fixed, **changes})[0]

        yield build


@torch.no_grad()
def copy_weights(whole: nn.Module, stages: Sequence[Any]) -> None:
    """Gives stages the weights of the whole model, by name."""
    values: dict[str, torch.Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    values |= dict(whole.named_buffers(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.copy_(values[name])
            parameter.requires_grad_(parameter.is_floating_point())
        for name, buffer in stage.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])
