"""Rows that may be left out of a run: counted, listed, and limited in number.

Without `leaving_out` the first bad row ends the run. Every rank leaves out the same rows.
"""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from stageline.errors import DataError


class BadRows:
    """The rows that were left out."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit  # most rows that may be left out; 0: none
        self.reasons: dict[str, str] = {}  # source of a row (file and line) -> what is wrong

    def __len__(self) -> int:
        return len(self.reasons)

    def take(self, source: str, error: Exception) -> None:
        """Note a bad row. Files are read once for each split: a row counts once."""
        if self.limit == 0:
            raise error
        self.reasons.setdefault(source, str(error))
        if len(self) > self.limit:
            raise DataError(
                f"more than {self.limit} bad rows, the limit of `skip_bad_rows`. Correct them, or "
                f"raise the limit:\n{self.listed(20)}"
            ) from error

    def listed(self, most: int | None = None) -> str:
        """Return a line for each row, at most `most`."""
        lines = [f"  {reason}" for reason in list(self.reasons.values())[:most]]
        rest = len(self) - len(lines)
        return "\n".join(lines + ([f"  and {rest} more"] if rest else []))

    def write(self, path: Path) -> None:
        """Write them as JSON lines, source and reason; no file where there are none."""
        rows = [{"source": source, "reason": reason} for source, reason in self.reasons.items()]
        if rows:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


_current: ContextVar[BadRows] = ContextVar("bad_rows", default=BadRows())  # noqa: B039


def current_bad_rows() -> BadRows:
    """Return where a reader notes a bad row: the one of `leaving_out`, or one that takes none."""
    return _current.get()


@contextlib.contextmanager
def leaving_out(bad_rows: BadRows) -> Iterator[BadRows]:
    """Let readers leave out bad rows while datasets are made."""
    token = _current.set(bad_rows)
    try:
        yield bad_rows
    finally:
        _current.reset(token)
