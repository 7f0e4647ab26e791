"""The table of the stage plan that is printed before the first step. Pure formatting."""

from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = (
    "stage",
    "rank",
    "device",
    "layers",
    "parts",
    "parameters",
    "trainable",
    "weights",
    "share",
)
_FIRST_NUMBER = _HEADER.index("parameters")  # from here on cells are aligned to the right


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
    """A line a stage and, where there are several, a line of totals.

    The share is that of the weights' bytes: what memory and, roughly, time go by.
    """
    all_bytes = sum(stage.num_bytes for stage in stages)
    rows = [
        (
            str(stage.stage),
            str(stage.rank),
            stage.device,
            stage.layers,
            stage.parts,
            *_figures(stage.num_parameters, stage.num_trainable, stage.num_bytes, all_bytes),
        )
        for stage in stages
    ]
    num_parameters = sum(stage.num_parameters for stage in stages)
    num_trainable = sum(stage.num_trainable for stage in stages)
    total = ("all", "", "", "", "", *_figures(num_parameters, num_trainable, all_bytes, all_bytes))
    totals = [total] if len(stages) > 1 else []
    table = [_HEADER, *rows, *totals]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADER))]
    rule = "  ".join("-" * width for width in widths)
    lines = [_join(row, widths) for row in table]
    lines.insert(1, rule)
    if totals:
        lines.insert(-1, rule)
    return "\n".join(lines)


def _figures(num_parameters: int, num_trainable: int, num_bytes: int, all_bytes: int) -> tuple:
    return (
        human_count(num_parameters),
        human_count(num_trainable),
        human_bytes(num_bytes),
        f"{num_bytes / max(all_bytes, 1):.1%}",
    )


def _join(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if column >= _FIRST_NUMBER else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    return _with_unit(count, base=1024, units=("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(count: float) -> str:
    """134_515_008 -> "134.5 M"."""
    return _with_unit(count, base=1000, units=("", "K", "M", "B", "T"))


def _with_unit(count: float, *, base: int, units: Sequence[str]) -> str:
    """One digit behind the point; a number that would round up to `base` takes the next unit."""
    unit = 0
    while unit + 1 < len(units) and round(count, 1 if unit else 0) >= base:
        count /= base
        unit += 1
    return f"{count:.1f} {units[unit]}" if unit else f"{count:.0f} {units[0]}".rstrip()


def human_memory(peaks: Sequence[int]) -> str:
    """Bytes of each stage in one short text: "605|507 MiB"; the largest gives the unit."""
    if not peaks:
        return "?"
    unit, name = next(
        (
            (1024**power, name)
            for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"))
            if max(peaks) >= 1024**power
        ),
        (1024, "KiB"),
    )
    digits = 1 if unit >= 1024**3 else 0
    return "|".join(f"{peak / unit:.{digits}f}" for peak in peaks) + f" {name}"
