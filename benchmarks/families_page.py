"""Writes docs/models.md: one row a name, from what benchmarks/families.py found."""

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Said = Literal["equal", "close", "WRONG", "crash", "refused", "no model"]
ORDER = ("WRONG", "crash", "refused", "no model", "close", "equal")
WORDS = {
    "equal to the bit": "equal to the bit",
    "equal": "equal, sums in another order",
    "close": "close",
    "WRONG": "**wrong**",
    "crash": "**crash**",
    "refused": "refused",
    "no model": "not tried",
}
HEAD = """# Supported models

After this page you know whether your model family is split exactly. Check yours, without weights
or a GPU:

```bash
python tools/tiny_model.py qwen3 my_tiny
stageline check --num-stages 2 --train-model causal_lm --config-path my_tiny
```

Every name that transformers {transformers} lists for causal language models and for
image-text-to-text models was tried on {date} with PyTorch {torch} on a CPU.

A configuration is scaled down to 4 to 8 layers with every kind of layer among them. Weights, norms
and biases are random, and multipliers are not 1. The stages are filled from a saved folder and run
one after the other in one process, on 2 and on 3 stages, with and without a tied head. Only
detached tensors pass a stage boundary. Losses, logits and **every gradient** are compared with the
unsplit model of transformers, on a padded and on a full micro-batch; for vision-language models on
rows with several images, one image and none. A family that is not in this table, or that another
version of transformers changed, is compared in the same way when a run begins (`--prove-split`).

- **equal to the bit**: all bits of losses, logits and gradients are the same, on each split.
- **equal, sums in another order**: the difference is at most 1e-13 of the largest number in
  float64 (1e-5 in float32). Gradients of a weight on two stages are added in another order.
- **close**: the difference is larger than that, and at most 1e-9 (1e-4 in float32).
- **refused**: the run ends before it begins, with one sentence that names the family.
- **not tried**: there is no scaled-down model, for the reason given.

`float32` marks families whose operators do not support float64. The table is made by `python
benchmarks/families.py --all --markdown docs/models.md`.

{counts}
"""
TITLES = {"text": "Causal language models", "vision": "Vision-language models"}
COLUMNS = "| name | stages | result | computed in | remark |"


@dataclass(frozen=True)
class FamilyResult:
    """What was found about one family, split one way.

    Attributes:
        detail: the refusal's sentence, the exception, or where the difference is.
        largest: the greatest difference, as a share; 0 for equal bits.
    """

    name: str
    kind: str
    num_stages: int
    is_tied: bool
    said: Said
    detail: str = ""
    largest: float = 0.0
    dtype: str = "float64"

    def row(self) -> dict[str, Any]:
        return asdict(self)


def write_page(verdicts: Sequence[FamilyResult], path: Path) -> None:
    """Writes the page."""
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
        counts=_counts(verdicts),
    )
    for kind, title in TITLES.items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        text += f"\n## {title}\n\n{COLUMNS}\n|---|---|---|---|---|\n"
        text += "".join(_row(name, found) for name, found in sorted(rows.items()))
    path.write_text(text, encoding="utf-8")


def _by_name(verdicts: Sequence[FamilyResult]) -> dict[str, list[FamilyResult]]:
    found: dict[str, list[FamilyResult]] = {}
    for one in verdicts:
        found.setdefault(one.name, []).append(one)
    return found


def _worst(found: Sequence[FamilyResult]) -> FamilyResult:
    return min(found, key=lambda one: (ORDER.index(one.said), -one.largest))


def _result(found: Sequence[FamilyResult]) -> str:
    worst = _worst(found)
    if worst.said == "equal" and not worst.largest:
        return WORDS["equal to the bit"]
    figure = f" ({worst.largest:.0e})" if worst.said in ("equal", "close") else ""
    return WORDS[worst.said] + figure


def _row(name: str, found: Sequence[FamilyResult]) -> str:
    worst = _worst(found)
    stages = ", ".join(str(one) for one in sorted({one.num_stages for one in found}))
    if worst.said == "no model":
        stages = "-"
    detail = worst.detail.replace("|", "\\|") if worst.said != "equal" else ""
    dtype = worst.dtype if stages != "-" else "-"
    return f"| `{name}` | {stages} | {_result(found)} | {dtype} | {detail} |\n"


def _counts(verdicts: Sequence[FamilyResult]) -> str:
    lines = []
    for kind, title in TITLES.items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        results = [_result(found).split(" (")[0] for found in rows.values()]
        counted = ", ".join(
            f"{results.count(word)} {word}" for word in WORDS.values() if word in results
        )
        lines.append(f"- {title}: {len(rows)}; {counted}")
    return "\n".join(lines)
