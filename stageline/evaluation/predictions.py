"""predictions.jsonl: one line a sample, appended as answers come, continued after a stop.

A line counts for the same sample and the same settings only; how many devices or which batches
made it does not matter. Of several replicas number 3 writes predictions-3.jsonl beside it. These
shards are merged at the end of a run and, after a run that was killed, at the beginning of the
next, whatever the number of its replicas.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageline.errors import DataError

Key = tuple[Any, str]  # settings and id of a record


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
        for record in _checked(self.path):
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
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)


def newest_records(path: Path) -> dict[str, dict[str, Any]]:
    """Sample id -> record, of the settings that the last line was written with.

    Raises:
        DataError: a line is damaged, or nothing is there.
    """
    records = [record for record in _checked(path) if "error" not in record]
    if not records:
        raise DataError(
            f"{path} holds no prediction. At least one was expected, because they are compared: "
            "give the predictions.jsonl of a finished evaluation."
        )
    newest = records[-1].get("settings")
    return {record["id"]: record for record in records if record.get("settings") == newest}


def _checked(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in which no run answers a sample twice and differently."""
    seen: dict[Key, tuple[int, str]] = {}
    for number, record, _ in _lines(path):
        if "error" not in record:
            first, text = seen.setdefault(_key(record), (number, record["prediction"]))
            if text != record["prediction"]:
                raise DataError(
                    f"{path}:{number}: sample {record['id']!r} has another prediction in line "
                    f"{first}. One was expected, because nobody knows which counts: two runs may "
                    "have written into this folder at once. Delete one of the lines, or give "
                    "another `output_dir`."
                )
        yield record


def _lines(
    path: Path, *, leaves_out_torn: bool = False
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """(number, record, line) of each line that is not empty.

    Raises:
        DataError: a line is no record.
    """
    content = path.read_bytes()
    if leaves_out_torn:
        content = content[: content.rfind(b"\n") + 1]
    # not splitlines(): a text may hold line breaks that are no "\n", such as U+2028
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if line.strip():
            yield number, parse_line(line, f"{path}:{number}"), line


def _key(record: dict[str, Any]) -> Key:
    return record.get("settings"), record["id"]


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
    kept: dict[Key, tuple[bool, str]] = {}  # whether it is an answer, its line
    for source in [*([path] if path.exists() else []), *shards]:
        for _, record, line in _lines(source, leaves_out_torn=True):
            key, is_answer = _key(record), "error" not in record
            if is_answer or not kept.get(key, (False, ""))[0]:
                kept.pop(key, None)  # the newest lines stand last
                kept[key] = (is_answer, line)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for _, line in kept.values())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    for shard in shards:
        shard.unlink()
    return len(shards)
