"""The table of the stage plan that is printed before the first step. Pure formatting."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageSummary:
    """One stage in figures.

    Attributes:
        layers: global indices of its layers, as text such as "0-6".
        parts: names of the parts it holds.
        num_parameters, num_trainable: a tied weight counts on each stage that holds it.
        num_bytes: of the weights.
    """

    stage: int
    rank: int
    device: str
    layers: str
    parts: str
    num_parameters: int
    num_trainable: int
    num_bytes: int


def format_stage_table(stages: Sequence[StageSummary]) -> str:
    """A line a stage and a line of totals."""
    header = ("stage", "rank", "device", "layers", "parts", "parameters", "trainable", "weights")
    rows = [
        (
            str(stage.stage),
            str(stage.rank),
            stage.device,
            stage.layers,
            stage.parts,
            f"{stage.num_parameters:,}",
            f"{stage.num_trainable:,}",
            human_bytes(stage.num_bytes),
        )
        for stage in stages
    ]
    total = (
        "all",
        "",
        "",
        "",
        "",
        f"{sum(stage.num_parameters for stage in stages):,}",
        f"{sum(stage.num_trainable for stage in stages):,}",
        human_bytes(sum(stage.num_bytes for stage in stages)),
    )
    table = [header, *rows, total]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if column >= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
