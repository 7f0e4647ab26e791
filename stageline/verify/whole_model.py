"""The whole model that `stageline check` compares stages with.

It is transformers' own class where transformers has one. A model that is cut or has no checkpoint
gets random weights in a folder, from which stages load them as from any checkpoint.
"""

import copy
import shutil
from collections.abc import Callable
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
from stageline.checkpoint.plain_model import load_whole, save_whole
from stageline.data.text.processor import load_processor
from stageline.errors import CheckpointError, UserError, spelled
from stageline.model_folder import load_config, refused_build
from stageline.modules.lora import WRAPPED, LoRAWrapper
from stageline.modules.lora_layer import LoRALayer, name_seed
from stageline.modules.stage_names import names_on_disk

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

Build = Callable[..., "StageModel"]  # (stage=, num_stages=, source=)
ReferenceKind = Literal["auto", "transformers", "part"]


@dataclass(frozen=True)
class ModelSource:
    """Paths that every stage is built from."""

    config_path: str | None
    model_path: str | None
    processor_path: str | None


@dataclass(frozen=True)
class Preparation:
    """The paths that all stages are built from, and the kind of whole model."""

    source: ModelSource
    config: PretrainedConfig
    is_library: bool  # the whole model is transformers' class, not the part on one stage
    notes: tuple[str, ...] = ()  # everything cut or replaced

    @property
    def weights(self) -> Path:
        """The checkpoint that holds the model's weights; of an adapter, its base."""
        return base_of(find_checkpoint(str(self.source.model_path)))


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
    """Find or make the weights.

    Args:
        source: the paths that the user gave.
        folder: for what has to be made.
        layers: only the first ones of the language model, with random weights.

    Raises:
        UserError: there is no config, or no such reference.
    """
    origin = source.config_path or source.model_path
    if origin is None:
        raise UserError(
            "a check requires the model's config.json. Add `model_path` or `config_path`, the same "
            "as for training."
        )
    config = load_config(origin, trust_remote_code=trust_remote_code)
    auto_class, notes = None, []
    if reference != "part":
        auto_class = library_class(config, trust_remote_code=trust_remote_code)
    if auto_class is None and reference == "transformers":
        raise UserError(
            f"`check.reference` transformers: transformers has no model {config.model_type!r}. "
            "Leave the option out to compare with the part on one stage."
        )
    processor = source.processor_path or source.model_path or source.config_path or ""
    try:
        load_processor(processor, trust_remote_code=trust_remote_code)
    except CheckpointError:
        raise  # there is one, and it is broken
    except (UserError, OSError, ValueError):
        notes.append(f"{processor} holds no tokenizer or processor: token ids are random")
        # parts load a tokenizer, and a check on random ids needs one token. It has a folder of its
        # own: next to a config transformers would look for the model's processor
        processor = str(folder / "tokenizer")
        backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
        stand_in = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
        stand_in.save_pretrained(processor)
    if layers is not None:
        text = config.get_text_config(decoder=True)
        before = text.num_hidden_layers
        if layers > before:
            raise UserError(
                f"`check.layers` {layers} is more than the {before} layers of the model. Give "
                f"{before} or less."
            )
        for name, value in list(vars(text).items()):
            if isinstance(value, list | tuple) and len(value) == before:  # an entry a layer
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
        cut = f"the model was cut from {before} to {layers} layers (`check.layers`)"
        notes.append(spelled(f"{cut}; its weights are random, a checkpoint was not read"))
    elif source.model_path is None:
        notes.append(spelled("no `model_path`: the weights are random"))
    if layers is None and source.model_path is not None:
        source = ModelSource(source.config_path, source.model_path, processor)
    else:
        save_config(config, origin, folder)
        config = load_config(folder, trust_remote_code=trust_remote_code)
        source = ModelSource(str(folder), str(folder), processor)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if auto_class is not None:
                given = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
                try:
                    whole = auto_class.from_config(config, **given)
                except Exception as error:  # transformers raises what it likes
                    raise refused_build(config, auto_class, error) from error
                _move_constants(whole)
                save_whole(whole, folder)
            else:  # the part on one stage
                part = build(stage=0, num_stages=1, source=replace(source, model_path=None))
                _move_constants(part)
                key_map, state = names_on_disk(part), part.state_dict()
                state = {
                    key_map[name]: value.detach().clone().contiguous()
                    for name, value in state.items()
                    if name in key_map
                }
                save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})
    made = Preparation(source, config, auto_class is not None, tuple(notes))
    names = weight_files(made.weights, fetches=False)
    if made.is_library and any(WRAPPED in name.split(".") for name in names):
        note = "the checkpoint has LoRA names in it, which transformers can't read"
        made = replace(made, is_library=False, notes=(*notes, note))
    return made


def library_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Return the transformers Auto class that builds this model; None if there is none."""
    choices = {
        "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageTextToText": transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    remote = getattr(config, "auto_map", None) or {}
    for name in sorted(choices, reverse=has_images(config)):
        if type(config) in choices[name] or (trust_remote_code and name in remote):
            return getattr(transformers, name)
    return None


def has_images(config: PretrainedConfig) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def save_config(config: PretrainedConfig, origin: str, folder: Path) -> None:
    """Writes config.json, with the Python files that are next to the original."""
    config.save_pretrained(folder)
    path = Path(origin)
    for file in (path if path.is_dir() else path.parent).glob("*.py"):
        shutil.copy(file, folder)


@torch.no_grad()
def _move_constants(model: nn.Module) -> None:
    """Moves norms and biases from the 0 and 1 they start at, which hide a swap or a loss."""
    for parameter in model.parameters():
        if parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.05)


def load_unsplit(
    preparation: Preparation, *, build: Build, seed: int, trust_remote_code: bool
) -> nn.Module:
    """Load the whole model: with transformers where it has the class, else as one stage.

    Raises:
        CheckpointMismatch: names or shapes in the checkpoint are not the part's.
    """
    single = build(stage=0, num_stages=1, source=preparation.source)
    start_lora(single, seed=seed)
    if not preparation.is_library:
        return single
    config, checkpoint = copy.deepcopy(preparation.config), preparation.weights
    if checkpoint.is_file():  # not the other weights of its folder
        config.transformers_weights = checkpoint.name
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    inner = getattr(single, "whole", None)
    if inner is not None:
        options["attn_implementation"] = inner.config._attn_implementation
    auto_class = library_class(config, trust_remote_code=trust_remote_code)
    whole = load_whole(auto_class, checkpoint, config, is_changed=True, **options)
    trains = {name: parameter.requires_grad for name, parameter in single.named_parameters()}
    for name, wrapper in list(single.named_modules()):
        if isinstance(wrapper, LoRAWrapper) and WRAPPED not in name.split("."):
            holder = wrapper
            while isinstance(holder.lora_module, LoRAWrapper):
                holder = holder.lora_module
            holder.lora_module = whole.get_submodule(name)
            whole.set_submodule(name, wrapper)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trains.get(name, True))
    return whole.train()


@torch.no_grad()
def start_lora(model: nn.Module, *, seed: int) -> None:
    """Gives adapters that start at zero random values by name: at zero they hide what A does."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALayer) and not module.lora_B.weight.any():
            weight = module.lora_B.weight
            generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_B.weight"))
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
