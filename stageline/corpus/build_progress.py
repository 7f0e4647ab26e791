"""Shows how far a build is: a bar in a terminal, a line every ten seconds elsewhere."""

import sys
import time
from typing import Any, TextIO

_SECONDS_A_LINE = 10.0
MB = 1e6


class BuildProgress:
    """Bytes of the input that are done, and the time that is left.

    Args:
        total: bytes of all files.
        done: of them by an earlier start.
        is_shown: False shows nothing.
        stream: by default the standard error.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int = 0,
        is_shown: bool = True,
        stream: TextIO | None = None,
        seconds_a_line: float = _SECONDS_A_LINE,
    ) -> None:
        self._stream = stream or sys.stderr
        self._total, self._first, self._done = total, done, done
        self._since = self._last = time.monotonic()
        self._seconds = seconds_a_line
        self._is_shown = is_shown
        self._bar = self._make_bar() if is_shown and self._stream.isatty() else None

    def add(self, num_bytes: int) -> None:
        """Some more are done."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """For example "12.3 of 190.7 MB, 11.2 MB/s, 16 s left"."""
        speed = (self._done - self._first) / max(1e-9, time.monotonic() - self._since)
        left = f"{(self._total - self._done) / speed:.0f} s left" if speed else "time unknown"
        done, total = self._done / MB, self._total / MB
        return f"{done:.1f} of {total:.1f} MB, {speed / MB:.1f} MB/s, {left}"

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self._total,
            initial=self._done,
            unit="B",
            unit_scale=True,
            file=self._stream,
            desc="corpus",
        )
