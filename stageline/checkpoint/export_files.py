"""Writes the files of an exported folder: weights, configuration, what tokenizes and generates.

Each operation on files begins with `chaos.point("file")`, so that a test can stop before any of
them. Not here: how the folder gets its name (`export.py`, `layout.py`).
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from stageline import chaos
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, open_tensors, write_tensors
from stageline.errors import StorageError

# what tokenizers, processors and templates of the library keep in files; nothing of a training
# run is among them
_COPIED = (
    "tokenizer*.json",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
_CODE = "*.py"


@contextmanager
def storage_errors(target: Path, needed: int) -> Iterator[None]:
    """Turns a failed write into a `StorageError` with the path and the space there is."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):
            raise
        raise StorageError(
            f"{target} could not be written ({error}): about {needed:,} bytes were needed, "
            f"{_free_bytes(target):,} are free there. Nothing was left of it; make room or choose "
            "another --output-path."
        ) from error


def _free_bytes(target: Path) -> int:
    folder = next(path for path in target.parents if path.exists())
    return shutil.disk_usage(folder).free


def write_model(
    model: PreTrainedModel,
    draft: Path,
    *,
    generation: Path | None,
    max_shard_bytes: int,
    keeps_code: bool,
) -> None:
    """Writes weights, index and configuration by the library's own writer.

    Args:
        generation: generation_config.json of the model, copied as it is: the library refuses to
            write some that it reads.
        keeps_code: the configuration may name Python files; they are copied too.
    """
    if not keeps_code:
        _forget_code(model.config)
    if generation is not None:
        model.generation_config = GenerationConfig()
    chaos.point("file")
    model.save_pretrained(draft, max_shard_size=max_shard_bytes)
    if generation is not None:
        chaos.point("file")
        shutil.copyfile(generation, draft / GENERATION_CONFIG_NAME)


def _forget_code(config: PretrainedConfig) -> None:
    """Takes the names of Python files out, which would not be there."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if hasattr(part, "auto_map"):
            del part.auto_map


def untie_changed_head(model: PreTrainedModel) -> None:
    """Says in the configuration that a head got a weight of its own, as an adapter may give it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding is None or head.weight is embedding.weight:
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def write_adapter(source: Path, draft: Path, dtype: torch.dtype | None) -> None:
    """Writes one adapter in the format of `peft`; of stacked ones it is their sum."""
    config = json.loads((source / ADAPTER_CONFIG).read_text())
    base = str(config.get("base_model_name_or_path") or "")
    if base and not Path(base).expanduser().exists() and (source / base).exists():
        config["base_model_name_or_path"] = str((source / base).resolve())
    with open_tensors(source / ADAPTER_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    chaos.point("file")
    (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(tensors, draft / ADAPTER_FILE)
    if (source / "config.json").is_file():  # the run changed the base's
        shutil.copyfile(source / "config.json", draft / "config.json")


def copy_side_files(source: Path, draft: Path, *, with_code: bool) -> None:
    """Copies tokenizer, processor and templates, and code where it is allowed."""
    for pattern in (*_COPIED, *([_CODE] if with_code else [])):
        for path in sorted(source.glob(pattern)):
            target = draft / path.relative_to(source)
            if path.is_file():
                chaos.point("file")
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def write_card(text: str, curve: Path | None, draft: Path) -> None:
    """Writes README.md, and the picture of the loss beside it."""
    chaos.point("file")
    (draft / "README.md").write_text(text, encoding="utf-8")
    if curve is not None:
        chaos.point("file")
        shutil.copyfile(curve, draft / "loss.png")


def open_to_readers(draft: Path) -> None:
    """Gives weights the rights of the other files: safetensors writes for the owner alone."""
    rights = (draft / "README.md").stat().st_mode
    for path in draft.glob("*.safetensors"):
        path.chmod(rights)
