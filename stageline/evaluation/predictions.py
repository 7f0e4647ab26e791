"""predictions.jsonl: one line a sample, appended as answers come, continued after a stop.

A line counts for the same sample and the same settings only; how many devices or which batches
made it does not matter.
"""

import hashlib
import json
import os
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
                "into this folder at once. Delete one of the lines, or give another --output-dir."
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
