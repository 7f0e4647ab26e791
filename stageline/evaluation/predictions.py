"""predictions.jsonl: one line a sample, appended as answers come, continued after a stop.

A line counts for the same sample and the same settings only; how many devices or which batches
made it does not matter.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageline.errors import DataError


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash of everything that changes an answer."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PredictionFile:
    """Reads what is there, appends what comes.

    Args:
        settings_key: `fingerprint` of the run's settings; lines of others are left alone.

    Attributes:
        records: sample id -> its answer.
        errors: sample id -> why it got none, at some time.
    """

    def __init__(self, path: str | Path, *, settings_key: str) -> None:
        self.path = Path(path)
        self.settings_key = settings_key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self._drop_torn_line()
        for record in _records(self.path, with_failed=True):
            if record.get("settings") == settings_key:
                self._take(record)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds lines; they are on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                record = {"settings": self.settings_key, **record}
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
                self._take(record)
            file.flush()
            os.fsync(file.fileno())

    def _take(self, record: dict[str, Any]) -> None:
        if "error" in record:
            self.errors[record["id"]] = str(record["error"])
        else:
            self.records[record["id"]] = record

    def _drop_torn_line(self) -> None:
        """Cuts off a last line without its end: the process was killed while writing it."""
        self.path.touch()
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))


def newest_records(path: Path) -> dict[str, dict[str, Any]]:
    """Sample id -> record, of the settings that the last line was written with.

    Raises:
        DataError: a line is damaged, or nothing is there.
    """
    records = list(_records(path))
    if not records:
        raise DataError(
            f"{path} holds no prediction. At least one was expected, because they are compared: "
            "give the predictions.jsonl of a finished evaluation."
        )
    newest = records[-1].get("settings")
    return {record["id"]: record for record in records if record.get("settings") == newest}


def _records(path: Path, *, with_failed: bool = False) -> Iterator[dict[str, Any]]:
    """The answers of a file; samples that failed are left out unless they are asked for.

    Raises:
        DataError: a line is no record, or two lines of one run answer a sample differently.
    """
    seen: dict[tuple[Any, str], tuple[int, str]] = {}
    # not splitlines(): a text may hold line breaks that are no "\n", such as U+2028
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_line(line, f"{path}:{number}")
        if "error" in record:
            if with_failed:
                yield record
            continue
        key = (record.get("settings"), record["id"])
        first, text = seen.setdefault(key, (number, record["prediction"]))
        if text != record["prediction"]:
            raise DataError(
                f"{path}:{number}: sample {record['id']!r} has another prediction in line {first}. "
                "One was expected, because nobody knows which counts: two runs may have written "
                "into this folder at once. Delete one of the lines, or give another `output_dir`."
            )
        yield record


def parse_line(line: str, source: str) -> dict[str, Any]:
    """The record of a line; of a sample that failed it has `error`.

    Raises:
        DataError: it is none.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        record = str(error)
    is_record = isinstance(record, dict) and isinstance(record.get("id"), str)
    if is_record and ("error" in record or isinstance(record.get("prediction"), str)):
        return record
    raise DataError(
        f"{source}: {line[:60]!r} is no prediction. An object with id and prediction was expected, "
        "as evaluate.py writes them: delete the line, and its sample is answered again."
    )


# -- predictions that several replicas wrote side by side, made into one file again ---------------
# Replica 3 writes predictions-3.jsonl beside predictions.jsonl. Shards are merged at the end of a
# run and, after a run that was killed, at the beginning of the next, whatever the number of its
# replicas.

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
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in [*kept, *taken.values()])
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
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
