"""What is known of the training of a checkpoint: from its manifest and the run folder around it.

Reads files and judges nothing; what is not there stays unknown. Paths keep their last two parts:
an exported folder goes to other people.
"""

import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stageline.checkpoint.layout import MANIFEST

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


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run, up to one checkpoint.

    Attributes:
        manifest: of the checkpoint.
        options: of the run by name, as in config.yaml, in its order.
        steps, evaluations: records of the log up to the checkpoint.
        curve: the picture of the loss.
    """

    manifest: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()
    evaluations: tuple[dict[str, Any], ...] = ()
    curve: Path | None = None

    @property
    def step(self) -> int | None:
        """Optimizer steps done when the checkpoint was saved."""
        value = self.manifest.get("step")
        return value if isinstance(value, int) else None

    @property
    def keys(self) -> dict[str, Any]:
        """Register -> key of the part that was chosen."""
        return {name: self.options[name] for name in KEYS if self.options.get(name) is not None}

    def lora(self) -> dict[str, str]:
        """Part with LoRA -> its rank, alpha and layers in words."""
        told = {}
        for part in ("vit", "mlp", "llm"):
            if not self.options.get(f"{part}-lora-num"):
                continue
            rank, alpha, target = (
                own
                if (own := self.options.get(f"{part}-lora-{name}")) is not None
                else self.options.get(f"lora-{name}")
                for name in ("rank", "alpha", "target")
            )
            layers = ", ".join(map(str, target)) if isinstance(target, list) else "all"
            told[part] = f"rank {rank}, alpha {alpha}, linear layers: {layers}"
        return told

    def command(self) -> str | None:
        """The command line of the run, of all its options; None: they are not known."""
        words = ["python", "train_pp.py"]
        for name, value in self.options.items():
            if value is None:
                continue
            values = value if name == "import" and isinstance(value, list) else [value]
            words += ["--" + name, *(_word(item) for item in values)]
        return " ".join(words) if len(words) > 2 else None


def read_run_facts(checkpoint: Path) -> RunFacts:
    """The facts of a checkpoint folder; of a folder from elsewhere they are empty."""
    manifest = _read_json(checkpoint / MANIFEST)
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints":
        return RunFacts(manifest)
    facts = RunFacts(manifest, _read_options(run / CONFIG))
    records = _read_log(run / LOG, last=facts.step)
    curve = run / CURVE
    return RunFacts(
        manifest,
        facts.options,
        tuple(record for record in records if record.get("kind") != "eval"),
        tuple(record for record in records if record.get("kind") == "eval"),
        curve if curve.is_file() else None,
    )


def short_path(text: str) -> str:
    """The last two parts of a path; other text as it is."""
    return "/".join(Path(text).parts[-2:]).lstrip("/") if "/" in text else text


def is_number(value: object) -> bool:
    """Whether a figure of a log can be compared: null stands for what was not finite."""
    return isinstance(value, int | float) and math.isfinite(value)


def _word(value: object) -> str:
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return short_path(value) if isinstance(value, str) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_options(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): _shortened(value) for name, value in found.items()}


def _read_log(path: Path, *, last: int | None) -> list[dict[str, Any]]:
    """Records up to step `last`; of steps that were run again the later ones."""
    records: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        while records and _order(records[-1]) >= _order(record):
            records.pop()
        records.append(record)
    return [record for record in records if last is None or record["step"] <= last]


def _order(record: dict[str, Any]) -> tuple[int, bool]:
    return record["step"], record.get("kind") == "eval"
