"""Draws samples with their predictions as a grid of pictures."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MAX_CHARACTERS = 160


def plot_predictions(
    images: Sequence[Any | None],
    titles: Sequence[str],
    correct: Sequence[bool | None],
    path: str | Path,
    *,
    columns: int = 6,
) -> None:
    """Writes a grid of samples.

    Args:
        images: one picture per sample, None for a sample of text.
        titles: what stands below each.
        correct: True is framed green, False red, None grey.
    """
    rows = max(1, math.ceil(len(images) / columns))
    figure = Figure(figsize=(2.2 * columns, 2.9 * rows), layout="constrained")
    for index, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set_xticks([])
        axes.set_yticks([])
        if index >= len(images):
            axes.axis("off")
            continue
        color = {True: "tab:green", False: "tab:red", None: "grey"}[correct[index]]
        text = _wrap(titles[index])
        if images[index] is not None:
            axes.imshow(images[index].convert("RGB"))
            axes.set_xlabel(text, fontsize=8, color=color)
        else:
            axes.text(0.03, 0.97, text, va="top", fontsize=7, color=color, wrap=True)
        for spine in axes.spines.values():
            spine.set_edgecolor(color)
            spine.set_linewidth(2)
    figure.savefig(path, dpi=100)


def _wrap(text: str) -> str:
    """Short lines; a dollar sign would start a formula."""
    lines = []
    for line in text.replace("$", r"\$").splitlines():
        shown = line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"
        lines += textwrap.wrap(shown, 30) or [""]
    return "\n".join(lines)
