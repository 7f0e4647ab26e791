"""Write the folder of a tiny model: configuration, and a tokenizer or processor that fits it.

`python tools/tiny_model.py qwen3 FOLDER`: it trains in seconds on a CPU and has all of its family's
code. There are no weights: a run starts at random, with --config-path FOLDER.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.distributed.failure import run_entry
from stageline.errors import UserError

NUM_POSITIONS = 512
NUM_LAYERS = 4


def main() -> None:
    """Read the command line, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", help="a model type of transformers, or a key of --train-model")
    parser.add_argument("folder", type=Path, help="a new or an empty folder")
    given = parser.parse_args()
    if given.folder.exists() and (not given.folder.is_dir() or any(given.folder.iterdir())):
        raise UserError(
            f"{given.folder} is there already, and nothing is overwritten. Give a new or an empty "
            "folder."
        )
    write(given.family, given.folder)
    print(f"{given.folder}: a tiny {given.family}; train it with --config-path {given.folder}")


def write(family: str, folder: Path) -> None:
    """Write configuration and tokenizer or processor of a family."""
    from stageline.data.text.processor import save_processor

    config, processor = make(family)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_processor(processor, folder)


def make(family: str) -> tuple[Any, Any]:
    """Return (configuration, tokenizer or processor) of a family."""
    from tests.helpers.tiny_models import (
        DECODERS,
        PROCESSOR_FAMILIES,
        VISION_LANGUAGE,
        tiny_config,
        tiny_mllama_config,
        tiny_mllama_processor,
        tiny_processor,
        tiny_tokenizer,
    )

    sizes: dict[str, Any] = {"max_position_embeddings": NUM_POSITIONS}
    if family == "mllama":
        processor = tiny_mllama_processor()
        return tiny_mllama_config(vocab_size=len(processor.tokenizer)), processor
    pictured = [one for one in PROCESSOR_FAMILIES if one in VISION_LANGUAGE]
    if family in pictured:
        processor = tiny_processor(family)
        return tiny_config(family, vocab_size=len(processor.tokenizer), **sizes), processor
    tokenizer = tiny_tokenizer()
    if family in DECODERS:
        return tiny_config(family, vocab_size=len(tokenizer), **sizes), tokenizer
    return _shrunk(family, tokenizer, pictured=[*pictured, "mllama"]), tokenizer


def _shrunk(family: str, tokenizer: Any, *, pictured: list[str]) -> Any:
    import transformers

    from stageline.shrink import layer_period, shrink_config
    from tests.helpers.family_configs import family_config

    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family not in known:
        raise UserError(
            f"transformers {transformers.__version__} has no decoder of model type {family!r}. "
            "Give a type that it has (llama, granite, ...; see docs/models.md), or one of "
            f"{', '.join(pictured)}."
        )
    config = family_config(family)
    config = shrink_config(config, num_layers=max(NUM_LAYERS, layer_period(config)))
    text = config.get_text_config(decoder=True)
    text.vocab_size = max(text.vocab_size, len(tokenizer))
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = text.vocab_size
    return config


if __name__ == "__main__":
    run_entry(main)
