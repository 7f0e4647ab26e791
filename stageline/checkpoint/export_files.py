"""Writes the files of an exported folder: weights, configuration, tokenizer, model card.

The card (README.md) says what the manifest of a checkpoint and the run folder around it tell; what
is not there is left out. Paths keep their last two parts: a folder goes to other people.
"""

import ctypes
import json
import math
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import PEFT_PREFIX, find_base
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    find_checkpoint,
    open_tensors,
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
from stageline.errors import StorageError, UserError
from stageline.run_records import read_log

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
            "another `output_path`."
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
    configs = (model.config, *(getattr(model.config, name) for name in model.config.sub_configs))
    for config in configs:
        if hasattr(config, "auto_map") and not keeps_code:
            del config.auto_map
    if generation is not None:
        model.generation_config = GenerationConfig()
    save_whole(model, draft, max_shard_size=max_shard_bytes)
    if generation is not None:
        shutil.copyfile(generation, draft / GENERATION_CONFIG_NAME)


def untie_changed_head(model: PreTrainedModel) -> None:
    """Says in the configuration that a head got a weight of its own, as an adapter may give it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding is None or head.weight is embedding.weight:
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def write_adapter(source: Path, draft: Path, dtype_of: Callable[[str], torch.dtype] | None) -> None:
    """Writes one adapter in the format of `peft`; of stacked ones it is their sum.

    Args:
        dtype_of: name of a weight in the model -> its type; None: as it is.
    """
    config = json.loads((source / ADAPTER_CONFIG).read_text())
    base = str(config.get("base_model_name_or_path") or "")
    if base and not Path(base).expanduser().exists() and (source / base).exists():
        config["base_model_name_or_path"] = str((source / base).resolve())
    with open_tensors(source / ADAPTER_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    if dtype_of is not None:
        tensors = {
            name: tensor.to(dtype_of(name.removeprefix(PEFT_PREFIX)))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in tensors.items()
        }
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
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def write_card(text: str, curve: Path | None, draft: Path) -> None:
    """Writes README.md, and the picture of the loss beside it."""
    (draft / "README.md").write_text(text, encoding="utf-8")
    if curve is not None:
        shutil.copyfile(curve, draft / "loss.png")


def open_to_readers(draft: Path) -> None:
    """Gives weights the rights of the other files: safetensors writes for the owner alone."""
    rights = (draft / "README.md").stat().st_mode
    for path in draft.glob("*.safetensors"):
        path.chmod(rights)


_CURRENT_FOLDER, _EXCHANGE = -100, 2  # of renameat2, linux/fcntl.h
MODEL_FILES = ("config.json", ADAPTER_CONFIG)


def find_source(path: str | Path) -> Path:
    """The folder that is exported, with links followed: `best` may move meanwhile.

    Raises:
        UserError: there is none, or it is no model or adapter folder.
    """
    source = find_checkpoint(path).resolve()
    if source.is_dir() and any((source / name).exists() for name in MODEL_FILES):
        return source
    held = sorted(item.name for item in (source / "checkpoints").glob("*"))
    what = f"it holds the checkpoints {', '.join(held)}: give one of them" if held else "give one"
    raise UserError(
        f"`model_path` {path} has no {' or '.join(MODEL_FILES)}, the folder of a model or an "
        f"adapter was expected, because weights alone do not say what computes with them; {what}."
    )


def check_target(source: Path, target: Path, *, overwrites: bool) -> None:
    """Refuses a target that is there, unless it may be replaced and is a model folder."""
    if not overwrites or not target.exists():
        refuse_existing(target)
        return
    kept = [source, *([find_base(source)] if (source / ADAPTER_CONFIG).exists() else [])]
    held = [path for path in kept if path.resolve().is_relative_to(target.resolve())]
    if held:
        raise UserError(
            f"`overwrite` came with `output_path` {target}, in which {held[0]} lies, which is "
            "needed: another folder was expected, since this one is removed. Choose another."
        )
    is_model = any((target / name).is_file() for name in MODEL_FILES)
    if target.is_symlink() or not is_model:
        raise UserError(
            f"`overwrite` came with `output_path` {target}, which is no model folder: one with "
            f"{' or '.join(MODEL_FILES)} was expected, since all in it is removed. Choose "
            "another folder."
        )


def publish_over(draft: Path, target: Path, *, facts: dict[str, object]) -> None:
    """Gives the draft its name; an old folder of that name goes when the new one is in place."""
    if not target.exists():
        publish(draft, target, facts=facts, known={})
        return
    ready = target.with_name(draft_name(target))
    try:
        publish(draft, ready, facts=facts, known={})
        old = ready if _exchange(ready, target) else _rename_in_turn(ready, target)
    except BaseException:
        discard(ready)
        raise
    fsync_path(target.parent)  # before the old one goes
    discard(old)


def _exchange(one: Path, other: Path) -> bool:
    """Two folders swap their names in one step, where the system can do that (Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return rename(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE) == 0


def _rename_in_turn(ready: Path, target: Path) -> Path:
    """Renames the old folder away and the new one in; where the old one is then."""
    old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    target.rename(old)
    try:
        ready.rename(target)
    except BaseException:
        old.rename(target)
        raise
    return old


CONFIG, LOG, CURVE = "config.yaml", "log.jsonl", "loss.png"
KEYS = (
    "train-model",
    "dataset",
    "prompt",
    "prompt-fn",
    "image-token",
    "collate-fn",
    "loss-fn",
    "optimizer",
    "lr-scheduler",
    "engine",
)
MAX_ROWS = 12  # of the curve as a table, where there is no picture
Kind = Literal["model", "adapter", "merged"]
_WHAT = {
    "model": "Weights of a whole model",
    "adapter": "A LoRA adapter for `peft`",
    "merged": "A whole model, with its LoRA adapter added to the weights",
}
# options that tell of a machine or of files, not of the training
_NOT_SHOWN = ("model-path", "config-path", "processor-path", "dataset-path", "output-dir", "import")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the exported model itself; `base` is the path that it started from."""

    name: str
    kind: Kind
    model_type: str | None
    class_name: str | None
    has_images: bool
    base: str | None = None

    @classmethod
    def of(
        cls, config: PretrainedConfig | None, *, name: str, kind: Kind, base: str | None
    ) -> "ModelFacts":
        """From the configuration of the model, of an adapter that of its base; None: unknown."""
        return cls(
            name=name,
            kind=kind,
            model_type=getattr(config, "model_type", None),
            class_name=next(iter(getattr(config, "architectures", None) or []), None),
            has_images=getattr(config, "vision_config", None) is not None,
            base=None if base is None else short_path(base),
        )


@dataclass(frozen=True)
class RunFacts:
    """What the manifest, config.yaml and log of a run say up to one checkpoint."""

    manifest: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: Sequence[dict[str, Any]] = ()
    evaluations: Sequence[dict[str, Any]] = ()
    curve: Path | None = None

    def lora(self) -> dict[str, str]:
        """Part with LoRA -> its rank, alpha and layers in words."""
        told = {}
        for part in ("vit", "mlp", "llm"):
            if not self.options.get(f"{part}-lora-num"):
                continue
            rank, alpha, target = (
                own
                if (own := self.options.get(f"parts.{part}.lora_{name}")) is not None
                else self.options.get(f"lora.{name}")
                for name in ("rank", "alpha", "target")
            )
            layers = ", ".join(map(str, target)) if isinstance(target, list) else "all"
            told[part] = f"rank {rank}, alpha {alpha}, linear layers: {layers}"
        return told

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
    manifest = _read_object(checkpoint / MANIFEST, json.loads)
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints":
        return RunFacts(manifest)
    options = _shortened(_read_object(run / CONFIG, yaml.safe_load))
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


def _read_object(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """What a file holds by name; empty where there is none."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def model_card(model: ModelFacts, run: RunFacts) -> str:
    """The whole text of README.md."""
    base = model.base or run.options.get("model-path")
    dataset = run.options.get("dataset-path") or run.options.get("dataset")
    is_scored = (model.class_name or "").endswith(CLASSIFIER)
    task = "image-text-to-text" if model.has_images else "text-generation"
    tags = ["stageline", model.model_type, "lora" if model.kind != "model" else None]
    data = ModelCardData(
        base_model=base,
        datasets=[dataset] if dataset else None,
        library_name="peft" if model.kind == "adapter" else "transformers",
        pipeline_tag="text-classification" if is_scored else task,
        tags=[tag for tag in tags if tag],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---\n\n# {model.name}\n",
        _summary(model, run, base),
        _how_to_load(model),
        _figures(run),
        _training(run),
    ]
    versions = run.manifest.get("versions") or {}
    if names := ", ".join(f"{name} {value}" for name, value in versions.items()):
        sections.append(f"## Versions\n\nTrained with {names}.\n")
    return "\n".join(section for section in sections if section)


def _summary(model: ModelFacts, run: RunFacts, base: str | None) -> str:
    kind = f" (`{model.model_type}`)" if model.model_type else ""
    lines = [f"{_WHAT[model.kind]}{kind}."]
    if base:
        lines.append(f"It started from `{base}`.")
    elif run.options:
        lines.append("Its weights started at random.")
    key, path = run.options.get("dataset"), run.options.get("dataset-path")
    if key:
        lines.append(f"It was trained on the dataset `{key}`{f' (`{path}`)' if path else ''}.")
    if "step" in run.manifest:
        lines.append(f"It was saved after {run.manifest['step']} optimizer steps.")
    return " ".join(lines) + "\n"


def _how_to_load(model: ModelFacts) -> str:
    auto = "AutoModelForImageTextToText" if model.has_images else "AutoModelForCausalLM"
    if model.class_name and not model.class_name.endswith(_LANGUAGE_MODELS):
        auto = model.class_name
    name, reader = (
        ("processor", "AutoProcessor") if model.has_images else ("tokenizer", "AutoTokenizer")
    )
    lines = [f"from transformers import {auto}, {reader}", ""]
    if model.kind == "adapter":
        base = repr(model.base or "the base model")
        labels = ", num_labels=1" if auto.endswith(CLASSIFIER) else ""
        lines = ["from peft import PeftModel", *lines]
        lines += [
            f'base = {auto}.from_pretrained({base}, dtype="auto"{labels})',
            f"model = PeftModel.from_pretrained(base, {model.name!r})",
        ]
    else:
        lines.append(f'model = {auto}.from_pretrained({model.name!r}, dtype="auto")')
    lines.append(f"{name} = {reader}.from_pretrained({model.name!r})")
    return "\n".join(["## How to load it\n", "```python", *lines, "```\n"])


def _figures(run: RunFacts) -> str:
    found = [
        ("last training step", run.steps[-1] if run.steps else None),
        ("last evaluation", run.evaluations[-1] if run.evaluations else None),
        ("lowest evaluation loss", _best(run.evaluations, "loss", min)),
        ("highest token accuracy", _best(run.evaluations, "token_accuracy", max)),
    ]
    rows = [
        (label, str(record["step"]), _figure(record, "loss"), _figure(record, "token_accuracy"))
        for label, record in found
        if record is not None
    ]
    if not rows:
        return ""
    parts = ["## Figures\n", _table(("", "step", "loss", "token accuracy"), rows)]
    if best := run.manifest.get("best"):
        parts.append(f"These are the weights of the best {best.get('metric')} so far.\n")
    return "\n".join([*parts, _curve(run)])


def _best(records: Sequence[dict], name: str, choose: Callable[..., dict]) -> dict | None:
    known = [record for record in records if _figure(record, name)]
    return choose(known, key=lambda record: record[name]) if known else None


def _figure(record: dict[str, Any], name: str) -> str:
    """A figure of the log; null stands for what was not finite."""
    value = record.get(name)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.4g}" if is_number else ""


def _curve(run: RunFacts) -> str:
    """The picture, or a few steps of it as a table."""
    if run.curve is not None:
        return "![Loss of the run](loss.png)\n"
    known = [record for record in run.steps if _figure(record, "loss")]
    if len(known) < 2:
        return ""
    count = min(MAX_ROWS, len(known))
    chosen = [known[i * (len(known) - 1) // (count - 1)] for i in range(count)]
    rows = [(str(record["step"]), _figure(record, "loss")) for record in chosen]
    return _table(("step", "training loss"), rows)


def _training(run: RunFacts) -> str:
    known = {name: value for name, value in run.options.items() if value is not None}
    if not known:
        return ""
    keys = [(name, f"`{known[name]}`") for name in KEYS if name in known]
    shown = {name: str(value) for name, value in known.items() if name not in KEYS + _NOT_SHOWN}
    tables = {
        ("part", "key"): keys,
        ("part", "LoRA"): list(run.lora().items()),
        ("option", "value"): list(shown.items()),
    }
    parts = [_table(head, rows) for head, rows in tables.items() if rows]
    command = f"The run as a command, of all its options:\n\n```bash\n{run.command()}\n```\n"
    return "\n".join(["## Training\n", *parts, command])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
