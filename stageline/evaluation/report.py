"""From scores per sample to a report: shares with 95 % intervals, overall and per group."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Z_95 = 1.959963984540054


def wilson_interval(num_hits: float, count: int, *, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share (Wilson 1927); it stays within 0 and 1 and is right at both ends."""
    if count == 0:
        return (0.0, 1.0)
    share = num_hits / count
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (max(0.0, center - half), min(1.0, center + half))


def make_report(figures: dict[str, Any], *, settings: dict[str, Any]) -> dict[str, Any]:
    """The report of a metric's figures.

    Args:
        figures: `score`, `per_sample` (0 or 1 each), `groups` ({name: indices}); more is passed on.
        settings: how the predictions were made.
    """
    per_sample = figures["per_sample"]
    groups = {
        name: _share([per_sample[index] for index in indices])
        for name, indices in sorted(figures.get("groups", {}).items())
    }
    others = {
        name: value
        for name, value in figures.items()
        if name not in ("score", "per_sample", "groups")
    }
    return {**_share(per_sample), "groups": groups, **others, "settings": settings}


def _share(scores: Sequence[float]) -> dict[str, Any]:
    low, high = wilson_interval(sum(scores), len(scores))
    return {
        "score": sum(scores) / len(scores) if scores else None,
        "interval_95": [low, high],
        "num_samples": len(scores),
    }


def write_report(report: dict[str, Any], path: str | Path) -> None:
    """Writes report.json; a torn write leaves the old one."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n")
    os.replace(temporary, path)


def format_report(report: dict[str, Any]) -> str:
    """A table: a line a group, the whole set last."""
    rows = [*report["groups"].items(), ("all", report)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{'group':<{width}}  {'score':>6}  {'95 % interval':>15}  {'samples':>7}"]
    for name, share in rows:
        low, high = share["interval_95"]
        score = "-" if share["score"] is None else f"{share['score']:.4f}"
        lines.append(
            f"{name:<{width}}  {score:>6}  {f'{low:.3f} - {high:.3f}':>15}  "
            f"{share['num_samples']:>7}"
        )
    return "\n".join(lines)
