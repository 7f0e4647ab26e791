"""Small data sets of one-turn conversations in files of each kind, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def chat_row(question: str, answer: str = "yes") -> dict[str, Any]:
    """Return a row of messages."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_chat(path: Path, questions: Sequence[str]) -> Path:
    """Write a file of JSON lines, with one conversation for each question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(chat_row(question, f"{question}!")) + "\n" for question in questions]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def asked(dataset: Any, count: int | None = None) -> list[str]:
    """Return the question of each row, or of the first `count`."""
    rows = range(len(dataset) if count is None else count)
    return [dataset[row][1]["messages"][0]["content"] for row in rows]
