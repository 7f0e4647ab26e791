"""Prompts without answers as a dataset: lines of a text file, rows of a JSON file, or texts."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageline.data.json_lines import image_names
from stageline.data.readers import Row, RowsDataset, read_rows
from stageline.errors import DataError

_NAMES = ("question", "prompt", "instruction")


class PromptRows(RowsDataset):
    """What is asked, a sample a prompt; its answer is empty unless the row has one.

    A row is {"question": ...} (or prompt, or instruction and input) with "image" if there is one,
    or {"messages": [...]}. Its `id` is its own, or made of its place and its content, so that a
    prompt that was changed is answered anew.

    Args:
        texts: the prompts themselves.
        path: a file of them: .jsonl or .json with rows; any other has one prompt a line.

    Raises:
        DataError: names file and line of a row that asks nothing.
    """

    def __init__(self, texts: Sequence[str] = (), *, path: str | Path | None = None) -> None:
        rows = [Row(text, f"--text {place}", place) for place, text in enumerate(texts, start=1)]
        self._name = "text"
        roots: list[Path] = []
        if path is not None:
            file = Path(path)
            self._name = file.stem
            roots = [file.parent, file.parent / "images"]
            rows += read_rows(file) if file.suffix in (".jsonl", ".json") else _lines(file)
        super().__init__(rows, image_roots=roots)

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        sample = {"question": row.data} if isinstance(row.data, str) else dict(row.data)
        name = next((name for name in _NAMES if isinstance(sample.get(name), str)), None)
        if sample.get("messages") is not None:
            sample.setdefault("question", _last_text(sample["messages"]))
        elif name is None:
            raise DataError(
                f"{row.source}: the row asks nothing. Text in one of the fields "
                f"{', '.join(_NAMES)}, or messages, was expected, because it is what is answered; "
                f"the row has the fields {', '.join(sorted(sample)) or 'none'}: correct the row."
            )
        else:
            extra = sample.get("input") if name == "instruction" else None
            sample["question"] = sample[name] + (f"\n{extra}" if extra else "")
            sample.setdefault("answer", "")  # a template may have a place for it
        content = json.dumps(row.data, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        sample["id"] = str(sample.get("id", f"{self._name}-{row.number}-{digest}"))
        return image_names(row.source, sample), sample


def _lines(file: Path) -> list[Row]:
    """A prompt a line; empty lines ask nothing."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: byte {error.start} is no UTF-8. A text file with a prompt a line was "
            "expected: save it as UTF-8, or give rows as .jsonl."
        ) from error
    rows = [
        Row(line.strip(), f"{file}:{number}", number)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(f"{file} holds no prompt. A line with text was expected: write one.")
    return rows


def _last_text(messages: Any) -> str:
    """What was asked last, for the screen and for comparing."""
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) else json.dumps(content)
    return ""
