"""Read the files of a run folder, such as log.jsonl, and write inf and nan in JSON."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

OLD_NAMES = {"learning_rate": "lr", "tokens_per_second": "tok/s"}  # names in earlier versions


def read_log(path: str | Path) -> tuple[list[dict], list[dict]]:
    """Return the training and the evaluation records of a JSON-lines log, in order of steps.

    A line that a crash cut off is left out. Where a run was continued from an earlier step, what
    the log holds beyond that step belongs to weights that are gone: the later lines replace it.
    """
    records: list[dict] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(record, dict) or "step" not in record:
                continue
            is_mark = record.get("kind") == "resume"
            first = (record["step"] + 1, False) if is_mark else _order(record)
            while records and _order(records[-1]) >= first:
                records.pop()
            if not is_mark:
                records.append({_renamed(name): value for name, value in record.items()})
    steps = [record for record in records if not _order(record)[1]]
    return steps, [record for record in records if _order(record)[1]]


def _renamed(name: str) -> str:
    for old, new in OLD_NAMES.items():
        if name == old or name.startswith(f"{old}_"):  # learning_rate_vit is a part's
            return new + name.removeprefix(old)
    return name


def _order(record: dict) -> tuple[int, bool]:
    return record["step"], record.get("kind") == "eval"  # it comes after the step


def read_object(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in a file, by names; {} where it cannot be read or is not one."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def cut_torn_line(path: Path) -> None:
    """Remove a last line that a killed process cut off; the next one repeats it."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures for JSON: inf and nan become null.

    `non_finite` has what they were: {name: "nan" | "inf" | "-inf"}.
    """
    floats = {name: value for name, value in figures.items() if isinstance(value, float)}
    bad = {name: str(value) for name, value in floats.items() if not math.isfinite(value)}
    return {**figures, **dict.fromkeys(bad), "non_finite": bad} if bad else dict(figures)
