"""Predictions that several replicas wrote side by side, made into one file again.

Replica 3 writes predictions-3.jsonl beside predictions.jsonl. Shards are merged at the end of a run
and, after a run that was killed, at the beginning of the next, whatever the number of its replicas.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageline.evaluation.predictions import parse_line

Key = tuple[Any, str]


def shard_path(path: Path, replica: int) -> Path:
    """The shard of one replica."""
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


def find_shards(path: Path) -> list[Path]:
    """The shards that lie beside a file of predictions, the one that was last written to last."""
    pattern = re.compile(rf"{re.escape(path.stem)}-\d+{re.escape(path.suffix)}")
    found = [one for one in path.parent.iterdir() if pattern.fullmatch(one.name)]
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


def merge_shards(path: Path) -> int:
    """Puts the lines of all shards into the file and deletes the shards; returns their number.

    Of several answers to one sample with the same settings the newest counts, and an answer before
    a failure. A last line without its end is left out. Only one process may do this at a time; when
    it is killed, either the old file and the shards are there or the new file.

    Raises:
        DataError: a line in the middle of a file is damaged.
    """
    shards = find_shards(path)
    if not shards:
        return 0
    newest: dict[Key, tuple[bool, str]] = {}
    for shard in shards:
        for key, is_answer, line in _lines(shard):
            if is_answer or not newest.get(key, (False, ""))[0]:
                newest[key] = (is_answer, line)
    old = list(_lines(path)) if path.exists() else []
    answered = {key for key, is_answer, _ in old if is_answer}
    taken = {
        key: line for key, (is_answer, line) in newest.items() if is_answer or key not in answered
    }
    kept = [line for key, _, line in old if key not in taken]
    _replace(path, [*kept, *taken.values()])
    for shard in shards:
        shard.unlink()
    return len(shards)


def _lines(path: Path) -> Iterator[tuple[Key, bool, str]]:
    """(settings and id, whether it is an answer, the line) of each whole line."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8")
    for number, line in enumerate(whole.split("\n"), start=1):
        if line.strip():
            record = parse_line(line, f"{path}:{number}")
            yield (record.get("settings"), record["id"]), "error" not in record, line


def _replace(path: Path, lines: list[str]) -> None:
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
