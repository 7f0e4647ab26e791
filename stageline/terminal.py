"""What a run shows on its terminal: few lines before its first step, then whole lines beside a bar.

All that is said is kept in run.log, too. Only the process that reports says anything; what others
write (warnings, errors) starts on a line of its own. Imports no torch: the first lines precede it.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_LINES = 10  # before the first step
CLEARED = "\r\x1b[K"  # the line that a bar of another process may stand on


def is_first() -> bool:
    """Whether this process is the one of a run that prints; before the processes have met, too."""
    return os.environ.get("RANK", "0") == "0"


class Terminal:
    """The lines of a run; each process has one, `terminal`."""

    def __init__(self) -> None:
        self.path: Path | None = None  # of run.log
        self._kept: list[str] = []  # lines for it until it is there
        self._room: int | None = None  # lines that may still be shown; None: any number
        self._held: list[str] = []  # shown to nobody

    def begin_quietly(self) -> None:
        """From here to `started` few lines are shown; more go into the file alone."""
        self._room, self._held = MOST_LINES - 1, []  # the last line tells of the others

    def started(self) -> None:
        """The first step is done: says how many lines were not shown; from here all are."""
        held, self._held, self._room = self._held, [], None
        if len(held) > 1 and self.path is not None:
            held = [f"{len(held)} more lines are in {self.path}"]
        for line in held:
            print(line, flush=True)

    def keep(self, path: Path) -> None:
        """Writes into this file from now on, and what was said before."""
        self.path = path
        lines, self._kept = self._kept, []
        self._write(lines)

    def say(self, text: str, *, is_detail: bool = False) -> None:
        """Prints a text, on the process that reports.

        Args:
            is_detail: for the file alone.
        """
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
        # a full disk is told by what has to be kept there
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


terminal = Terminal()


class _Beside:
    """A stream of a terminal whose whole lines appear above the bar, not in it."""

    def __init__(self, stream: Any, bar: Any | None) -> None:
        self.stream, self.bar = stream, bar
        self._text = ""

    def write(self, text: str) -> int:
        whole, end, self._text = (self._text + text).rpartition("\n")
        if end:
            self._show(whole + end)
        return len(text)

    def finish(self) -> None:
        """Writes a line that nobody ended."""
        if self._text:
            self.stream.write(self._text)
        self.stream.flush()

    def _show(self, lines: str) -> None:
        if self.bar is None:
            self.stream.write(CLEARED + lines)
            self.stream.flush()
            return
        with self.bar.get_lock():
            self.bar.clear(nolock=True)
            self.stream.write(lines)
            self.stream.flush()
            self.bar.refresh(nolock=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def beside_bar(bar: Any | None) -> Iterator[None]:
    """Prints, warnings and logged lines of this process leave the bar whole.

    Args:
        bar: of tqdm; None: it is another process's, on the same terminal.
    """
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    beside = {name: _Beside(one, bar) for name, one in streams.items() if one.isatty()}
    for name, one in beside.items():
        setattr(sys, name, one)
        _move_handlers(one.stream, one)
    try:
        yield
    finally:
        for name, one in beside.items():
            one.finish()
            _move_handlers(one, one.stream)
            if getattr(sys, name) is one:
                setattr(sys, name, one.stream)


def _move_handlers(stream: Any, other: Any) -> None:
    """What is logged to one stream goes to the other: handlers keep the stream they began with."""
    loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is stream:
            handler.setStream(other)
