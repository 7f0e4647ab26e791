"""Ctrl-C: the first asks for a clean stop, a second one at least a second later ends at once.

Only SIGINT. A handler for SIGTERM would keep a rank alive that waits for its neighbour inside gloo:
Python runs handlers between bytecodes, and none runs there.
"""

import os
import signal
import sys
import time
from types import FrameType

INTERRUPTED = 130
# a terminal and a launcher may both pass on one key press
MIN_SECONDS_BETWEEN = 1.0


class _StopFlag:
    """Whether someone reads the flag, and when it was set."""

    is_read = False
    requested_at: float | None = None


_flag = _StopFlag()


def install_stop_handler() -> None:
    """Makes SIGINT set the flag that `stop_requested()` reads."""
    _flag.is_read = False
    _flag.requested_at = None
    signal.signal(signal.SIGINT, _on_interrupt)


def stop_requested() -> bool:
    """Whether a clean stop was asked for. Until it is first called, Ctrl-C ends the run at once."""
    _flag.is_read = True
    return _flag.requested_at is not None


def was_interrupted() -> bool:
    """Whether the flag is set; unlike `stop_requested()` it does not promise to stop."""
    return _flag.requested_at is not None


def _on_interrupt(signum: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _flag.is_read:
        _flag.requested_at = now
        raise KeyboardInterrupt
    if _flag.requested_at is None:
        _flag.requested_at = now
        if os.environ.get("RANK", "0") == "0":
            _say("Stopping after this step; Ctrl-C again ends at once without saving.")
    elif now - _flag.requested_at >= MIN_SECONDS_BETWEEN:
        os._exit(INTERRUPTED)


def _say(message: str) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{message}\n".encode())
