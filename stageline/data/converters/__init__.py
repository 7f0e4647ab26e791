"""Rows of the common formats -> canonical samples."""

from collections.abc import Callable, Mapping
from typing import Any

from stageline.errors import DataError

Converter = Callable[[dict[str, Any], str], dict[str, Any]]


def make_converter(
    formatting: str, *, columns: Mapping[str, str], tags: Mapping[str, str], ranking: bool = False
) -> Converter:
    """Passes rows with messages, text, or question and answer through."""
    own = {ours: theirs for ours, theirs in columns.items() if theirs}

    def convert(row: dict[str, Any], source: str) -> dict[str, Any]:
        sample = {**row, **{name: row[key] for name, key in own.items() if key in row}}
        if sample.get("messages") is None and not any(
            isinstance(sample.get(name), str) for name in ("text", "answer", "response")
        ):
            raise DataError(
                f"{source}: no messages, text or answer; the row has {', '.join(row) or 'nothing'}."
            )
        return sample

    return convert
