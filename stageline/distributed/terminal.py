"""Terminal output of a run: few lines before its first step, then whole lines above a bar.

Everything printed is in run.log, too. Only the reporting process prints. Imports no torch: the
first lines precede it.
"""

import contextlib
import os
import time
from pathlib import Path

MOST_LINES = 16  # before the first step


def is_first() -> bool:
    """Return whether this process prints for the run, also before the processes connect."""
    return os.environ.get("RANK", "0") == "0"


class Terminal:
    """Terminal output of a process; each has one, `terminal`."""

    def __init__(self) -> None:
        self.path: Path | None = None  # the path of run.log
        self._kept: list[str] = []  # lines for run.log before it exists
        self._room: int | None = None  # lines that may still be shown; None: any number
        self._held: list[str] = []  # lines that were not shown

    def begin_quietly(self) -> None:
        """Show few lines until `started`; further ones go only into the file."""
        self._room, self._held = MOST_LINES - 1, []  # the last line counts the others

    def started(self) -> None:
        """Print how many lines were not shown; from the first step on all are."""
        held, self._held, self._room = self._held, [], None
        if len(held) > 1 and self.path is not None:
            held = [f"{len(held)} more lines are in {self.path}"]
        for line in held:
            print(line, flush=True)

    def keep(self, path: Path) -> None:
        """Write all lines, earlier ones included, into this file."""
        self.path = path
        lines, self._kept = self._kept, []
        self._write(lines)

    def say(self, text: str, *, is_detail: bool = False) -> None:
        """Print a text, on the process that reports; a detail is only for the file."""
        if not is_first():
            return
        now = time.strftime("%H:%M:%S")
        lines = text.splitlines()
        self._write([f"{now} {line}" for line in lines])
        if is_detail:
            return
        if self._room is not None and len(lines) > self._room:
            self._held += lines
            return
        self._room = None if self._room is None else self._room - len(lines)
        print(text, flush=True)

    def _write(self, lines: list[str]) -> None:
        if self.path is None:
            self._kept += lines
            return
        # a full disk is reported by the files that must be written
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


terminal = Terminal()
