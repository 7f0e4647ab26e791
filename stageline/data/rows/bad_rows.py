"""Rows that may be left out of a run: counted, listed, and limited in number.

Without `leaving_out` the first bad row ends the run. Every rank reads the same files in the same
way, so all leave out the same rows without talking.
"""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from stageline.errors import DataError


class BadRows:
    """What was left out so far.

    Args:
        limit: most rows that may be left out; 0: none.

    Attributes:
        reasons: source of a row (file and line) -> what was wrong with it.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.reasons)

    def take(self, source: str, error: Exception) -> None:
        """Notes a bad row. Files are read once for each split: a row counts once.

        Raises:
            DataError: the error itself where no row may be left out, or that there are too many.
        """
        if self.limit == 0:
            raise error
        self.reasons.setdefault(source, str(error))
        if len(self) > self.limit:
            raise DataError(
                f"more than {self.limit} bad rows came, as many as `skip_bad_rows` {self.limit} "
                "leaves out; further ones may be a sign that the file is not what it should be. "
                f"Correct them, or raise the limit:\n{self.listed(20)}"
            ) from error

    def listed(self, most: int | None = None) -> str:
        """A line for each row, at most `most`."""
        lines = [f"  {reason}" for reason in list(self.reasons.values())[:most]]
        rest = len(self) - len(lines)
        return "\n".join(lines + ([f"  and {rest} more"] if rest else []))

    def write(self, path: Path) -> None:
        """Writes them as JSON lines, source and reason; where there are none, nothing."""
        if not self.reasons:
            return
        with path.open("w", encoding="utf-8") as file:
            for source, reason in self.reasons.items():
                file.write(json.dumps({"source": source, "reason": reason}) + "\n")


_STRICT = BadRows()
_current: ContextVar[BadRows | None] = ContextVar("bad_rows", default=None)


def current_bad_rows() -> BadRows:
    """Where a reader notes a bad row: those of `leaving_out`, or none may be left out."""
    bad_rows = _current.get()  # false where nothing was left out so far
    return _STRICT if bad_rows is None else bad_rows


@contextlib.contextmanager
def leaving_out(bad_rows: BadRows) -> Iterator[BadRows]:
    """Lets readers leave out bad rows while datasets are made."""
    token = _current.set(bad_rows)
    try:
        yield bad_rows
    finally:
        _current.reset(token)
