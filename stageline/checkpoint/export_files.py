"""Write the files of an exported folder: weights, configuration, tokenizer, model card.

The card (README.md) tells what is known from the manifest of a checkpoint and the run folder around
it. Paths keep their last two parts: a folder goes to other people.
"""

import json
import math
import operator
import secrets
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from huggingface_hub import ModelCardData
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import PEFT_PREFIX, base_of
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    FILE_MODE,
    find_checkpoint,
    read_tensors,
    write_tensors,
)
from stageline.checkpoint.layout import (
    MANIFEST,
    discard,
    draft_name,
    fsync_path,
    publish,
    refuse_existing,
)
from stageline.checkpoint.plain_model import CLASSIFIER, save_whole
from stageline.errors import UserError
from stageline.run_records import read_log, read_object
from stageline.tables import markdown_table

# files of tokenizers, processors and templates; those of a training run are not among them
_COPIED = (
    "tokenizer*.json vocab* merges.txt special_tokens_map.json added_tokens.json normalizer.json "
    "*.model *.spm *.tiktoken chat_template* additional_chat_templates/*.jinja "
    "*processor_config.json LICENSE* NOTICE*"
).split()
MODEL_FILES = ("config.json", ADAPTER_CONFIG)


def find_source(path: str | Path) -> Path:
    """The folder that is exported, with links followed: `best` may move meanwhile.

    Raises:
        UserError: there is none, or it is not a model or adapter folder.
    """
    source = find_checkpoint(path).resolve()
    if source.is_dir() and any((source / name).exists() for name in MODEL_FILES):
        return source
    held = sorted(item.name for item in (source / "checkpoints").glob("*"))
    cure = f"it holds the checkpoints {', '.join(held)}: give one of them" if held else "Give one"
    raise UserError(
        f"`model_path` {path} has no {' or '.join(MODEL_FILES)}, so it is not a model or adapter "
        f"folder. {cure}."
    )


def check_target(source: Path, target: Path, *, overwrites: bool) -> None:
    """Refuse a target that is there, unless it may be replaced and is a model folder."""
    if not overwrites or not target.exists():
        refuse_existing(target)
        return
    held = [
        path
        for path in (source, base_of(source))
        if path.resolve().is_relative_to(target.resolve())
    ]
    if held:
        raise UserError(
            f"`overwrite` would remove `output_path` {target}, which contains {held[0]}, a "
            "source of the export. Choose another folder."
        )
    is_model = any((target / name).is_file() for name in MODEL_FILES)
    if target.is_symlink() or not is_model:
        raise UserError(
            f"`overwrite` would remove `output_path` {target}, which is not a model folder: it has "
            f"no {' or '.join(MODEL_FILES)}. Choose another folder."
        )


def publish_over(draft: Path, target: Path, *, facts: dict[str, object]) -> None:
    """Give the draft its name; an old folder of that name goes when the new one is in place."""
    if not target.exists():
        publish(draft, target, facts=facts, known={})
        return
    ready = target.with_name(draft_name(target))
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    try:
        publish(draft, ready, facts=facts, known={})
        target.rename(old)
        ready.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        discard(ready)
        raise
    fsync_path(target.parent)  # before the old one goes
    discard(old)


def write_model(
    model: PreTrainedModel,
    draft: Path,
    *,
    generation: Path | None,
    max_shard_bytes: int,
    keeps_code: bool,
) -> None:
    """Write weights, index and configuration by transformers' own writer.

    Args:
        generation: generation_config.json of the model, copied as it is: transformers refuses to
            write some that it reads.
        keeps_code: the configuration may name Python files.
    """
    configs = (model.config, *(getattr(model.config, name) for name in model.config.sub_configs))
    for config in configs:
        if hasattr(config, "auto_map") and not keeps_code:
            del config.auto_map
    if generation is not None:
        model.generation_config = GenerationConfig()
    save_whole(model, draft, max_shard_size=max_shard_bytes)
    if generation is not None:
        shutil.copyfile(generation, draft / GENERATION_CONFIG_NAME)
    for path in draft.glob("*.safetensors"):
        path.chmod(FILE_MODE)  # safetensors makes files that only their owner can read


def write_adapter(source: Path, draft: Path, dtype_of: Callable[[str], torch.dtype] | None) -> None:
    """Write one adapter in the format of `peft`; of stacked ones it is their sum.

    Args:
        dtype_of: name of a weight in the model -> its type; None: as it is.
    """
    config = json.loads((source / ADAPTER_CONFIG).read_text())
    base = str(config.get("base_model_name_or_path") or "")
    if base and not Path(base).expanduser().exists() and (source / base).exists():
        config["base_model_name_or_path"] = str((source / base).resolve())
    tensors = dict(sorted(read_tensors(source / ADAPTER_FILE).items()))
    if dtype_of is not None:
        tensors = {
            name: value.to(dtype_of(name.removeprefix(PEFT_PREFIX)))
            if value.is_floating_point()
            else value
            for name, value in tensors.items()
        }
    (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(tensors, draft / ADAPTER_FILE)
    for name in ("config.json", GENERATION_CONFIG_NAME):  # the run changed the base's
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)


def copy_side_files(source: Path, draft: Path, *, with_code: bool) -> None:
    """Copy tokenizer, processor and templates, and code where it is allowed."""
    for pattern in [*_COPIED, *(["*.py"] if with_code else [])]:
        for path in sorted(source.glob(pattern)):
            target = draft / path.relative_to(source)
            if path.is_file():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


CONFIG, LOG, CURVE = "config.yaml", "log.jsonl", "loss.png"
Kind = Literal["model", "adapter", "merged"]
_WHAT = {
    "model": "Weights of a whole model",
    "adapter": "A LoRA adapter for `peft`",
    "merged": "A whole model, with its LoRA adapter added to the weights",
}
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class RunFacts:
    """Contents of the manifest, config.yaml and log of a run, up to one checkpoint."""

    manifest: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[dict[str, Any]] = ()
    evaluations: Sequence[dict[str, Any]] = ()
    curve: Path | None = None

    def command(self) -> str:
        """The command line of the run, of all its options."""
        words = ["python", "train_pp.py"]
        for name, value in self.options.items():
            if value is None:
                continue
            values = value if name == "import" and isinstance(value, list) else [value]
            words.append("--" + name)
            words += [item if isinstance(item, str) else json.dumps(item) for item in values]
        return shlex.join(words)


def read_run_facts(checkpoint: Path) -> RunFacts:
    """The facts of a checkpoint folder; of a folder from elsewhere they are empty."""
    manifest = read_object(checkpoint / MANIFEST, json.loads)
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints":
        return RunFacts(manifest)
    options = _shortened(read_object(run / CONFIG, yaml.safe_load))
    log, last = run / LOG, manifest.get("step", math.inf)
    steps, evaluations = (
        [record for record in records if record["step"] <= last]
        for records in (read_log(log) if log.is_file() else ([], []))
    )
    curve = run / CURVE
    return RunFacts(manifest, options, steps, evaluations, curve if curve.is_file() else None)


def short_path(text: str) -> str:
    """The last two parts of a path; other text as it is."""
    return "/".join(Path(text).parts[-2:]).lstrip("/") if "/" in text else text


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return short_path(value) if isinstance(value, str) else value


def model_card(
    run: RunFacts,
    config: PretrainedConfig | None,
    *,
    name: str,
    kind: Kind,
    base: str | None = None,
    is_scored: bool = False,
    has_ends: bool = False,
) -> str:
    """Return the text of README.md.

    Args:
        config: of the model, of an adapter that of its base; None: unknown.
        base: path of the model that it started from.
        is_scored: the adapter is a reward model's, whose base may be a language model.
        has_ends: the adapter has a generation_config.json, with the tokens that end its answers.
    """
    options = run.options
    model_type = getattr(config, "model_type", None)
    class_name = next(iter(getattr(config, "architectures", None) or []), "")
    class_name = f"AutoModel{CLASSIFIER}" if is_scored else class_name
    has_images = getattr(config, "vision_config", None) is not None
    started_from = short_path(base) if base else None
    base = started_from or options.get("model-path")
    dataset, path = options.get("dataset"), options.get("dataset-path")
    task = "image-text-to-text" if has_images else "text-generation"
    source = path or dataset
    tags: list[str | None] = ["stageline", model_type, "lora" if kind != "model" else None]
    data = ModelCardData(
        base_model=base,
        datasets=[source] if source else None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-classification" if class_name.endswith(CLASSIFIER) else task,
        tags=[tag for tag in tags if tag],
    )

    summary = [f"{_WHAT[kind]}{f' (`{model_type}`)' if model_type else ''}."]
    if base:
        summary.append(f"It started from `{base}`.")
    elif options:
        summary.append("Its weights started at random.")
    if dataset:
        where = f" (`{path}`)" if path else ""
        summary.append(f"It was trained on the dataset `{dataset}`{where}.")
    if "step" in run.manifest:
        summary.append(f"It was saved after {run.manifest['step']} optimizer steps.")

    auto = "AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM"
    if class_name and not class_name.endswith(_LANGUAGE_MODELS):
        auto = class_name
    loaded, reader = (
        ("processor", "AutoProcessor") if has_images else ("tokenizer", "AutoTokenizer")
    )
    more = ", GenerationConfig" if has_ends else ""
    code = [f"from transformers import {auto}, {reader}{more}", ""]
    if kind == "adapter":
        labels = ", num_labels=1" if auto.endswith(CLASSIFIER) else ""
        named = repr(started_from or "the base model")
        code = ["from peft import PeftModel", *code]
        code += [
            f'base = {auto}.from_pretrained({named}, dtype="auto"{labels})',
            f"model = PeftModel.from_pretrained(base, {name!r})",
        ]
        if has_ends:  # peft takes those of the base
            code.append(f"model.generation_config = GenerationConfig.from_pretrained({name!r})")
    else:
        code.append(f'model = {auto}.from_pretrained({name!r}, dtype="auto")')
    code.append(f"{loaded} = {reader}.from_pretrained({name!r})")

    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}\n",
        " ".join(summary) + "\n",
        "\n".join(["## How to load it\n", "```python", *code, "```\n"]),
        _figures(run),
    ]
    if options:
        told = f"The run as a command, of all its options:\n\n```bash\n{run.command()}\n```\n"
        sections.append(f"## Training\n\n{told}")
    versions = run.manifest.get("versions") or {}
    if told := ", ".join(f"{package} {value}" for package, value in versions.items()):
        sections.append(f"## Versions\n\nTrained with {told}.\n")
    return "\n".join(section for section in sections if section)


def _figures(run: RunFacts) -> str:
    found = {
        "last training step": run.steps[-1] if run.steps else None,
        "last evaluation": run.evaluations[-1] if run.evaluations else None,
    }
    for label, name, best in (
        ("lowest evaluation loss", "loss", min),
        ("highest token accuracy", "token_accuracy", max),
    ):
        known = [record for record in run.evaluations if _figure(record, name)]
        found[label] = best(known, key=operator.itemgetter(name), default=None)
    rows = [
        (label, str(record["step"]), _figure(record, "loss"), _figure(record, "token_accuracy"))
        for label, record in found.items()
        if record is not None
    ]
    if not rows:
        return ""
    parts = ["## Figures\n", markdown_table([("", "step", "loss", "token accuracy"), *rows]) + "\n"]
    if told := run.manifest.get("best"):
        parts.append(f"These are the weights of the best {told.get('metric')} so far.\n")
    if run.curve is not None:
        parts.append("![Loss of the run](loss.png)\n")
    return "\n".join(parts)


def _figure(record: dict[str, Any], name: str) -> str:
    """A figure of the log; null stands for what was not finite."""
    value = record.get(name)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if is_number else ""
