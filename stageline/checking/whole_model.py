"""Where a check takes config, weights and the whole model from; runs on rank 0 alone.

The whole model is the library's own class where it has one. A model that is cut or has no
checkpoint gets random weights, which are written to a folder, so that stages load them as they load
any checkpoint.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.files import ADAPTER_CONFIG, SINGLE_FILE, find_checkpoint, weight_files
from stageline.data.processor import load_processor
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import load_config
from stageline.modules.lora import WRAPPED

Build = Callable[..., nn.Module]


@dataclass(frozen=True)
class Source:
    """Paths that every stage is built from.

    Attributes:
        has_processor: the last one holds the model's own, not a stand-in.
    """

    config_path: str | None
    model_path: str | None
    processor_path: str | None
    has_processor: bool = True


def read_config(path: str | None, *, trust_remote_code: bool) -> PretrainedConfig:
    """The config of the model that is checked.

    Raises:
        UserError: no path, or no config that the library or a part of the user knows.
    """
    if path is None:
        raise UserError(
            "neither --model-path nor --config-path came: the model's config.json must lie in one "
            "of them, because its split is what is checked. Give the same as for training."
        )
    return load_config(path, trust_remote_code=trust_remote_code)


def cut_layers(config: PretrainedConfig, layers: int) -> int:
    """Shortens the language model to its first layers, in place; returns how many there were.

    Lists with an entry a layer (`layer_types`) are cut too. A vision tower stays.
    """
    text = config.get_text_config(decoder=True)
    before = text.num_hidden_layers
    if layers > before:
        raise UserError(
            f"--check-layers {layers} is more than the {before} layers of the model: it cuts a "
            f"model, it can't lengthen one. Give {before} or less."
        )
    per_layer = {
        name: value[:layers]
        for name, value in vars(text).items()
        if isinstance(value, list | tuple) and len(value) == before
    }
    for name, value in per_layer.items():
        setattr(text, name, value)
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


def has_processor(path: str | None, *, trust_remote_code: bool = False) -> bool:
    """Whether a folder holds a tokenizer or a processor."""
    if path is None:
        return False
    try:
        load_processor(path, trust_remote_code=trust_remote_code)
    except CheckpointError:
        raise  # there is one, and it is broken
    except (UserError, OSError, ValueError):
        return False
    return True


def save_stand_in_tokenizer(folder: Path) -> None:
    """A tokenizer of one token: parts load one, a check on random ids needs none."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(folder)


def save_config(config: PretrainedConfig, origin: str, folder: Path) -> None:
    """Writes config.json, with the Python files that lie beside the original."""
    config.save_pretrained(folder)
    path = Path(origin)
    for file in (path if path.is_dir() else path.parent).glob("*.py"):
        shutil.copy(file, folder)


def save_random_library_model(
    auto_class: Any, config: PretrainedConfig, folder: Path, *, seed: int, trust_remote_code: bool
) -> None:
    """A whole model of the library with random weights, saved by the library."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = auto_class.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        move_constants(whole)
    whole.save_pretrained(folder)


def save_random_part(part: nn.Module, folder: Path, *, seed: int) -> None:
    """The weights of a part on one stage, under the names that it reads them by."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        move_constants(part)
    key_map = part.get_key_map_without_last_lora()
    state = {
        key_map[name]: value.detach().clone().contiguous()
        for name, value in part.state_dict().items()
        if name in key_map
    }
    save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})


@torch.no_grad()
def move_constants(model: nn.Module) -> None:
    """Moves norms and biases from the 0 and 1 they start at, which hide a swap or a loss."""
    for parameter in model.parameters():
        if parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.05)


def weights_folder(model_path: str | None) -> Path:
    """The checkpoint that holds the model's weights; of an adapter, its base."""
    assert model_path is not None  # a model without one has been given a folder
    checkpoint = find_checkpoint(model_path)
    return find_base(checkpoint) if (checkpoint / ADAPTER_CONFIG).exists() else checkpoint


def is_plain(checkpoint: Path) -> bool:
    """Whether the library can read it: no LoRA names are in it."""
    return not any(WRAPPED in name.split(".") for name in weight_files(checkpoint))


def load_library_model(
    auto_class: Any,
    config: PretrainedConfig,
    checkpoint: Path,
    *,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The library's whole model with the weights of a checkpoint, in float32."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
    }
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    return auto_class.from_pretrained(folder, config=config, dtype=torch.float32, **options)
