"""The model card of an exported folder: README.md with what is known, and nothing invented.

Pure text: facts in, Markdown out.
"""

from dataclasses import dataclass
from typing import Any, Literal

import yaml
from transformers import PretrainedConfig

from stageline.checkpoint.run_facts import KEYS, RunFacts, is_number, short_path
from stageline.checkpoint.tasks import CLASSIFIER

Kind = Literal["model", "adapter", "merged"]
MAX_ROWS = 12  # of the curve as a table, where there is no picture
_WHAT = {
    "model": "Weights of a whole model",
    "adapter": "A LoRA adapter for `peft`",
    "merged": "A whole model, with its LoRA adapter added to the weights",
}
# options that tell of a machine or of files, not of the training
_NOT_SHOWN = ("model-path", "config-path", "processor-path", "dataset-path", "output-dir", "import")
_EVAL_FIGURES = ("loss", "token_accuracy")


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the exported model itself.

    Attributes:
        base: what it started from: a path whose last two parts may be told.
        class_name: the library's class; None: the configuration does not say.
    """

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


def model_card(model: ModelFacts, run: RunFacts) -> str:
    """The whole text of README.md."""
    sections = [
        _front_matter(model, run),
        f"# {model.name}\n",
        _summary(model, run),
        _how_to_load(model),
        _figures(run),
        _training(run),
        _versions(run),
    ]
    return "\n".join(section for section in sections if section)


def base_of(model: ModelFacts, run: RunFacts) -> str | None:
    """What the weights started from; None: at random, or not known."""
    return model.base or run.options.get("model-path")


def _front_matter(model: ModelFacts, run: RunFacts) -> str:
    tags = ["stageline", model.model_type, "lora" if model.kind != "model" else None]
    data: dict[str, Any] = {
        "base_model": base_of(model, run),
        "library_name": "peft" if model.kind == "adapter" else "transformers",
        "pipeline_tag": _pipeline_tag(model),
        "tags": [tag for tag in tags if tag],
        "datasets": [name] if (name := _dataset(run)) else None,
    }
    known = {name: value for name, value in data.items() if value is not None}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---\n"


def _pipeline_tag(model: ModelFacts) -> str:
    if (model.class_name or "").endswith(CLASSIFIER):
        return "text-classification"
    return "image-text-to-text" if model.has_images else "text-generation"


def _dataset(run: RunFacts) -> str | None:
    return run.options.get("dataset-path") or run.options.get("dataset")


def _summary(model: ModelFacts, run: RunFacts) -> str:
    kind = f" (`{model.model_type}`)" if model.model_type else ""
    lines = [f"{_WHAT[model.kind]}{kind}."]
    base = base_of(model, run)
    if base:
        lines.append(f"It started from `{base}`.")
    elif run.options:
        lines.append("Its weights started at random.")
    key, path = run.options.get("dataset"), run.options.get("dataset-path")
    if key:
        lines.append(f"It was trained on the dataset `{key}`{f' (`{path}`)' if path else ''}.")
    if run.step is not None:
        lines.append(f"It was saved after {run.step} optimizer steps.")
    return " ".join(lines) + "\n"


def _how_to_load(model: ModelFacts) -> str:
    auto = "AutoModelForImageTextToText" if model.has_images else "AutoModelForCausalLM"
    if model.class_name and not model.class_name.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    ):
        auto = model.class_name
    reader = "AutoProcessor" if model.has_images else "AutoTokenizer"
    name = "processor" if model.has_images else "tokenizer"
    folder = repr(model.name)
    how = 'dtype="auto"' + (", num_labels=1" if auto.endswith(CLASSIFIER) else "")
    if model.kind == "adapter":
        body = [
            "from peft import PeftModel",
            f"from transformers import {auto}, {reader}",
            "",
            f"base = {auto}.from_pretrained({(model.base or 'the base model')!r}, {how})",
            f"model = PeftModel.from_pretrained(base, {folder})",
        ]
    else:
        body = [
            f"from transformers import {auto}, {reader}",
            "",
            f'model = {auto}.from_pretrained({folder}, dtype="auto")',
        ]
    body.append(f"{name} = {reader}.from_pretrained({folder})")
    return "\n".join(["## How to load it\n", "```python", *body, "```\n"])


def _figures(run: RunFacts) -> str:
    rows = []
    for label, record in (
        ("last training step", _last(run.steps)),
        ("last evaluation", _last(run.evaluations)),
        ("lowest evaluation loss", _best(run.evaluations, "loss", min)),
        ("highest token accuracy", _best(run.evaluations, "token_accuracy", max)),
    ):
        if record is not None:
            shown = [_figure(record.get(name)) for name in _EVAL_FIGURES]
            rows.append(f"| {label} | {record['step']} | {' | '.join(shown)} |")
    if not rows:
        return ""
    head = ["## Figures\n", "| | step | loss | token accuracy |", "| --- | --- | --- | --- |"]
    lines = [*head, *rows, ""]
    if (chosen := run.manifest.get("best")) and isinstance(chosen, dict):
        lines.append(f"These are the weights of the best {chosen.get('metric')} so far.\n")
    return "\n".join([*lines, _curve(run)])


def _last(records: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
    return records[-1] if records else None


def _best(records: tuple[dict[str, Any], ...], name: str, choose: Any) -> dict[str, Any] | None:
    known = [record for record in records if is_number(record.get(name))]
    return choose(known, key=lambda record: record[name]) if known else None


def _figure(value: object) -> str:
    return f"{value:.4g}" if is_number(value) else ""


def _curve(run: RunFacts) -> str:
    """The picture, or a few steps of it as a table."""
    if run.curve is not None:
        return "![Loss of the run](loss.png)\n"
    known = [record for record in run.steps if is_number(record.get("loss"))]
    if len(known) < 2:
        return ""
    count = min(MAX_ROWS, len(known))
    chosen = [known[i * (len(known) - 1) // (count - 1)] for i in range(count)]
    rows = [f"| {record['step']} | {_figure(record['loss'])} |" for record in chosen]
    return "\n".join(["| step | training loss |", "| --- | --- |", *rows, ""])


def _training(run: RunFacts) -> str:
    shown = {
        name: value
        for name, value in run.options.items()
        if name not in (*KEYS, *_NOT_SHOWN) and value is not None
    }
    lines = ["## Training\n"]
    if run.keys:
        lines += ["| part | key |", "| --- | --- |"]
        lines += [f"| {name} | `{_cell(value)}` |" for name, value in run.keys.items()] + [""]
    if lora := run.lora():
        lines += ["| part | LoRA |", "| --- | --- |"]
        lines += [f"| {part} | {_cell(text)} |" for part, text in lora.items()] + [""]
    if shown:
        lines += ["| option | value |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in shown.items()] + [""]
    if command := run.command():
        lines += ["The run as a command, of all its options:\n", "```bash", command, "```\n"]
    return "\n".join(lines) if len(lines) > 1 else ""


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _versions(run: RunFacts) -> str:
    versions = run.manifest.get("versions")
    if not isinstance(versions, dict):
        return ""
    names = ", ".join(f"{name} {value}" for name, value in versions.items())
    return f"## Versions\n\nTrained with {names}.\n"
