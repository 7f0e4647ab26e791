"""Writes docs/models.md and its Chinese twin: one row a name, from verdicts."""

import datetime
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from stageline.checking.families import Verdict

ORDER = ("WRONG", "crash", "refused", "no model", "close", "equal")
WORDS = {
    "en": {
        "equal to the bit": "equal to the bit",
        "equal": "equal, sums in another order",
        "close": "close",
        "WRONG": "**wrong**",
        "crash": "**crash**",
        "refused": "refused",
        "no model": "not tried",
    },
    "zh": {
        "equal to the bit": "逐位相等",
        "equal": "相等，仅求和次序不同",
        "close": "接近",
        "WRONG": "**错误**",
        "crash": "**崩溃**",
        "refused": "拒绝",
        "no model": "未测试",
    },
}
HEADS = {
    "en": """# Models: which families are split exactly

Every name that transformers {transformers} lists for causal language models and for
image-text-to-text models, tried on {date} with PyTorch {torch} on a CPU. Each configuration is cut
down to 4 to 8 layers with every kind of layer among them; weights, norms and biases are random,
multipliers are off one. Stages are filled from a saved folder, by their own names, and run one
after the other, on 2 and 3 stages, tied and untied; only detached tensors cross a border. Losses,
logits and **every gradient** are compared with those of the library's whole model, on a padded and
a full micro-batch, and with pictures on rows of several, one and none. Families that are not in
this table, or that another version of the library changed, are tried when a run begins
(`--prove-split`).

- **equal to the bit**: all bits of losses, logits and gradients are the same, on each split.
- **equal, sums in another order**: at most 1e-13 of the largest number in float64, 1e-5 in float32:
  the gradients of a weight that two stages hold are added up in another order.
- **close**: more than that, at most 1e-9, 1e-4 in float32.
- **refused**: the run ends before it begins, in one sentence that names the family.
- **not tried**: there is no cut-down model, for the reason given.

float32 stands where a family has operators that know no float64. The table is made by
`python benchmarks/families.py --all --markdown docs/models.md`.

{counts}
""",
    "zh": """# 模型：哪些模型家族可以精确切分

transformers {transformers} 中因果语言模型与图文到文本模型的全部名称，
于 {date} 在 CPU 上用 PyTorch {torch} 逐一测试。每个配置缩小到 4 至 8 层，并包含每一种层；
权重、归一化与偏置均为随机数，乘数不为一。各阶段从保存的文件夹按自己的参数名读取权重，
分为 2 个和 3 个阶段依次运行，包括共享与不共享词嵌入；只有脱离计算图的张量穿过边界。
在有填充与无填充的微批次上（视觉模型则有多图、单图与无图的行），将损失、logits 和**每一个梯度**
与库中完整模型的结果比较。不在表中的家族，或因库的版本不同而有变化的家族，
会在运行开始时检验（`--prove-split`）。

- **逐位相等**：每种切分下损失、logits 与梯度的所有比特都相同。
- **相等，仅求和次序不同**：在 float64 下不超过最大数的 1e-13，float32 下不超过 1e-5：
  两个阶段共有的权重，其梯度按另一次序相加。
- **接近**：超过上述范围，但不超过 1e-9，float32 下不超过 1e-4。
- **拒绝**：运行在开始之前结束，并用一句话说明是哪个家族。
- **未测试**：没有缩小的模型，原因见表。

标有 float32 的家族含有不支持 float64 的算子。本表由
`python benchmarks/families.py --all --markdown docs/models.md` 生成。

{counts}
""",
}
TITLES = {
    "en": {"text": "Causal language models", "vision": "Vision-language models"},
    "zh": {"text": "因果语言模型", "vision": "视觉语言模型"},
}
COLUMNS = {
    "en": "| name | stages | result | computed in | remark |",
    "zh": "| 名称 | 阶段数 | 结果 | 精度 | 说明 |",
}


def write_pages(verdicts: Sequence[Verdict], path: Path) -> None:
    """Writes the page and, beside it, its twin with the ending .zh.md."""
    for language in HEADS:
        page = path if language == "en" else path.with_suffix(".zh.md")
        page.write_text(_page(verdicts, language), encoding="utf-8")


def _page(verdicts: Sequence[Verdict], language: str) -> str:
    text = HEADS[language].format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
        counts=_counts(verdicts, language),
    )
    for kind, title in TITLES[language].items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        text += f"\n## {title}\n\n{COLUMNS[language]}\n|---|---|---|---|---|\n"
        text += "".join(_row(name, found, language) for name, found in sorted(rows.items()))
    return text


def _by_name(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for one in verdicts:
        found.setdefault(one.name, []).append(one)
    return found


def _worst(found: Sequence[Verdict]) -> Verdict:
    return min(found, key=lambda one: (ORDER.index(one.said), -one.largest))


def _result(found: Sequence[Verdict], language: str) -> str:
    worst = _worst(found)
    if worst.said == "equal" and not worst.largest:
        return WORDS[language]["equal to the bit"]
    figure = f" ({worst.largest:.0e})" if worst.said in ("equal", "close") else ""
    return WORDS[language][worst.said] + figure


def _row(name: str, found: Sequence[Verdict], language: str) -> str:
    worst = _worst(found)
    stages = ", ".join(str(one) for one in sorted({one.num_stages for one in found}))
    if worst.said == "no model":
        stages = "-"
    detail = worst.detail.replace("|", "\\|") if worst.said != "equal" else ""
    dtype = worst.dtype if stages != "-" else "-"
    return f"| `{name}` | {stages} | {_result(found, language)} | {dtype} | {detail} |\n"


def _counts(verdicts: Sequence[Verdict], language: str) -> str:
    lines = []
    for kind, title in TITLES[language].items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        results = [_result(found, language).split(" (")[0] for found in rows.values()]
        counted = ", ".join(
            f"{results.count(word)} {word}" for word in WORDS[language].values() if word in results
        )
        lines.append(f"- {title}: {len(rows)}; {counted}")
    return "\n".join(lines)
