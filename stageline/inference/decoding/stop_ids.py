"""The tokens that end an answer, as a model's folder tells them."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from stageline.inference.generation import with_tokenizers


def stop_ids_of(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids from generation_config.json, or else from the configuration, and of the tokenizer."""
    if (folder / "generation_config.json").is_file():
        of_model = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        of_model = GenerationConfig.from_model_config(config).eos_token_id
    return tuple(with_tokenizers(of_model, tokenizer))
