"""Where a stage's configuration and weights come from."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.vocabulary import num_rows_on_disk
from stageline.data.processor import get_pad_token_id, load_processor
from stageline.errors import UserError
from stageline.model_folder import load_config
from stageline.modules.neftune import add_noise
from stageline.modules.new_rows import NewRows, put_new_rows, set_vocab_size, vocab_size_of


@dataclass(frozen=True)
class Source:
    """Where weights come from.

    Attributes:
        checkpoint_path: None: they are drawn.
    """

    checkpoint_path: str | None
    seed: int
    device: torch.device | str
    dtype: torch.dtype


def fill_stage(
    model: nn.Module,
    source: Source | None,
    *,
    new_rows: NewRows | None,
    neftune_alpha: float = 0.0,
) -> None:
    """Gives a stage on meta its weights, and says which of them train.

    Args:
        source: None: it stays on meta.
        neftune_alpha: noise on the embeddings in training; 0: none.
    """
    if source is not None:
        # whole weights wait on the host, one layer at a time goes on
        device = "cpu" if model.methods.quantization else source.device
        where = {"seed": source.seed, "device": device, "dtype": source.dtype}
        if source.checkpoint_path is None:
            init_split_model(model, **where)
        else:
            load_split_model(model, source.checkpoint_path, **where)
    model.methods.quantise(model, device="meta" if source is None else source.device)
    model.frozen()
    if new_rows is not None:
        put_new_rows(model, new_rows)
    if neftune_alpha:  # behind the rows of new tokens, which take the places of what was looked up
        add_noise(model, model.vocabulary, neftune_alpha)
    model.train()


def read_config(
    path: str | None,
    model_types: tuple[str, ...] | None,
    *,
    weights: str | None,
    trust_remote_code: bool,
) -> PretrainedConfig:
    """The config of the model.

    Args:
        model_types: the architectures that the chosen key serves; None: any.
        weights: a checkpoint that may have more rows than the config that its run began with.

    Raises:
        UserError: no path, no config there, or one of another architecture.
    """
    if path is None:
        raise UserError(
            "neither --model-path nor --config-path came: the model's config.json must lie in "
            "one of them; --model-path continues from weights, --config-path starts at random."
        )
    config = load_config(path, trust_remote_code=trust_remote_code)
    if model_types is not None and config.model_type not in model_types:
        raise UserError(
            f"{path} holds a model of type {config.model_type!r}, the chosen "
            f"--train-model serves {' or '.join(model_types)}: choose the key of that "
            "architecture, or a generic one (causal_lm, vision_language)."
        )
    if weights is not None:
        saved = num_rows_on_disk(Path(weights), of_base=True, trust_remote_code=trust_remote_code)
        set_vocab_size(config, saved or vocab_size_of(config))
    return config


def processor_of(path: str | None, *, trust_remote_code: bool) -> tuple[object, int]:
    """A processor and the id of its padding token."""
    if path is None:
        return None, 0
    processor = load_processor(path, trust_remote_code=trust_remote_code)
    return processor, get_pad_token_id(processor)
