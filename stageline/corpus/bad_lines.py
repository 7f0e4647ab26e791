"""The lines that gave no document: all counted, the first ones listed in PREFIX.bad.jsonl."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageline.corpus.journal import Progress
from stageline.corpus.row_text import BadLine
from stageline.errors import DataError, StorageError

SUFFIX = ".bad.jsonl"
NUM_LISTED = 1000


class BadLines:
    """Lists bad lines, or ends the build with the first one.

    Args:
        progress: how many were listed before this start; the list is cut to that.
        is_strict: a bad line ends the build.

    Raises:
        DataError: bad lines were passed over before, and now none is to be.
    """

    def __init__(
        self,
        path_prefix: str,
        *,
        progress: Progress,
        is_strict: bool,
        num_listed: int = NUM_LISTED,
    ) -> None:
        self.path = Path(f"{path_prefix}{SUFFIX}")
        self._progress = progress
        self._is_strict = is_strict
        self._num_listed = num_listed
        self._cut()
        if is_strict and progress.num_bad:
            raise DataError(
                f"{progress.num_bad} bad lines were passed over before this build was left, and "
                f"--strict asks for none:\n{self.listed()}\nCorrect them and begin anew with "
                "--overwrite, or go on without --strict."
            )

    def check(self, path: str, first_line: int, bad: Sequence[BadLine]) -> None:
        """Refuses those of a chunk where none may be.

        Args:
            first_line: lines of the file before the chunk.

        Raises:
            DataError: names file and line of the first.
        """
        if bad and self._is_strict:
            raise _strict_error(path, first_line, bad[0])

    def take(
        self, path: str, first_line: int, bad: Sequence[BadLine], kinds: Mapping[str, int]
    ) -> None:
        """Notes those of a chunk."""
        total = self._progress.bad_kinds
        for kind, number in kinds.items():
            total[kind] = total.get(kind, 0) + number
        self._list(path, first_line, bad)

    def listed(self, most: int = 5) -> str:
        """The first ones, a line each."""
        if not self.path.exists():
            return ""
        with self.path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in itertools.islice(file, most)]
        lines = [f"  {row['file']}:{row['line']}: {row['reason']}" for row in rows]
        rest = self._progress.num_bad - len(lines)
        return "\n".join(lines + ([f"  and {rest} more"] if rest > 0 else []))

    def _list(self, path: str, first_line: int, bad: Sequence[BadLine]) -> None:
        wanted = bad[: max(0, self._num_listed - self._progress.num_listed)]
        text = "".join(
            json.dumps(
                {
                    "file": path,
                    "line": first_line + item.line,
                    "reason": item.reason,
                    "start": item.start,
                }
            )
            + "\n"
            for item in wanted
        )
        if not text:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror or error}. What was built is "
                "kept: make room and run the same command again."
            ) from error
        self._progress.num_listed += len(wanted)
        self._progress.bad_bytes += len(text)  # ASCII

    def _cut(self) -> None:
        """Takes away what was listed after the journal was written."""
        if self._progress.bad_bytes == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            os.truncate(self.path, self._progress.bad_bytes)


def _strict_error(path: str, first_line: int, bad: BadLine) -> DataError:
    return DataError(
        f"{path}:{first_line + bad.line}: {bad.reason}. It begins with {bad.start!r}. A document "
        "was expected in every line, because of --strict: correct the line, or build without "
        "--strict, which counts such lines and leaves them out."
    )
