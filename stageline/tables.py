"""Tables for a terminal and in Markdown, numbers with units, orders of names. Pure formatting."""

import math
import re
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def format_table(rows: Rows, *, num_texts: int = 1, rules: Sequence[int] = ()) -> str:
    """Return aligned columns: `num_texts` texts on the left, the numbers after them on the right.

    Args:
        rows: the first one is the header.
        rules: rows above which a line is drawn.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for index, row in enumerate(rows):
        if index in rules:
            lines.append("  ".join("-" * width for width in widths))
        texts = map(str.ljust, row[:num_texts], widths)
        numbers = map(str.rjust, row[num_texts:], widths[num_texts:])
        lines.append("  ".join([*texts, *numbers]).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Rows, *, num_texts: int = 1) -> str:
    """Return the same table in Markdown; cells may contain any text."""
    rule = ["---"] * num_texts + ["--:"] * (len(rows[0]) - num_texts)
    marks = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "\\|"})
    cells = [["<br>".join(cell.translate(marks).splitlines()) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def natural_key(name: str) -> list[tuple[float, str]]:
    """Return a sort key that orders numbers in names: -90, 0, 9 o'clock, 10 o'clock, left."""
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", name):
        return [(float(name), "")]
    parts = re.split(r"(\d+)", name)
    words = [(float(part), "") if part.isdecimal() else (math.inf, part) for part in parts]
    return words if parts[0] else words[1:]


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    return human_count(count, base=1024, units=("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(
    count: float, *, base: int = 1000, units: Sequence[str] = ("", "K", "M", "B", "T")
) -> str:
    """134_515_008 -> "134.5 M"; a number that rounds up to `base` takes the next unit."""
    unit = 0
    while unit + 1 < len(units) and round(count, 1 if unit else 0) >= base:
        count /= base
        unit += 1
    return f"{count:.1f} {units[unit]}" if unit else f"{count:.0f} {units[0]}".rstrip()


def human_memory(peaks: Sequence[int]) -> str:
    """Return bytes of each stage in one short text: "605/507 MiB"; the largest gives the unit."""
    if not peaks:
        return "?"
    power = min(4, max(1, (max(peaks).bit_length() - 1) // 10))
    numbers = "/".join(f"{peak / 1024**power:.{int(power > 2)}f}" for peak in peaks)
    return f"{numbers} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
