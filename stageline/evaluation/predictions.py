"""predictions.jsonl: one line a sample, appended as answers come, continued after a stop.

A line counts for the same sample and the same settings only; how many devices or which batches
made it does not matter.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash of everything that changes an answer."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PredictionFile:
    """Reads what is there, appends what comes.

    Args:
        settings_key: `fingerprint` of the run's settings; lines of others are left alone.
    """

    def __init__(self, path: str | Path, *, settings_key: str) -> None:
        self.path = Path(path)
        self.settings_key = settings_key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: dict[str, dict[str, Any]] = {}
        self._drop_torn_line()
        for line in self.path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("settings") == settings_key and "error" not in record:
                self.records[record["id"]] = record

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds lines; they are on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                record = {"settings": self.settings_key, **record}
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
                if "error" not in record:
                    self.records[record["id"]] = record
            file.flush()
            os.fsync(file.fileno())

    def _drop_torn_line(self) -> None:
        """Cuts off a last line without its end: the process was killed while writing it."""
        self.path.touch()
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
