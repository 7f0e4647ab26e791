"""Passes signals that came to our launcher on to its workers, who save and end.

They have sessions of their own: no key press and no signal to a process group gets there.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from stageline.distributed.stop import CODES, MIN_SECONDS_BETWEEN, release_signals
from stageline.errors import CRASH, PREEMPTED

# after the deadline of the workers, who are then about to end by themselves
SECONDS_TO_END = 30.0
KILLED = 128 + signal.SIGKILL


class SignalsForWorkers:
    """The launcher's handlers; the first signal is passed on, a second one of its kind ends all.

    Args:
        folder: each worker leaves a file `RANK.pid` there.
        patience: seconds that the workers may take to save; 0: for ever.
    """

    def __init__(self, folder: Path, *, num_processes: int, patience: float) -> None:
        self.folder = folder
        self.num_processes = num_processes
        self.patience = patience
        self.times: dict[int, float] = {}
        self.code: int | None = None

    def install(self) -> None:
        """Takes over from the handlers of a worker."""
        release_signals()
        for signum in (*CODES, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def code_of(self, code: int) -> int:
        """The exit code of the run; that of the signal where the end of the workers tells none."""
        # workers that do not handle it yet die of it
        tells_none = code in (0, 1, CRASH, PREEMPTED, KILLED)
        return self.code if self.code is not None and tells_none else code

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = signum not in self.times
        first = self.times.setdefault(signum, now)
        if not is_first:
            if now - first >= MIN_SECONDS_BETWEEN:
                self._end(signal.SIGKILL, "signalled twice")
            return
        # workers know no SIGHUP: a terminal that is closed may send it to helpers, too
        passed_on = signal.SIGTERM if signum == signal.SIGHUP else signal.Signals(signum)
        if self.code is None:
            self.code = CODES[passed_on]
            if self.patience:
                signal.setitimer(signal.ITIMER_REAL, self.patience + SECONDS_TO_END)
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        if len(pids) < self.num_processes:  # still starting: there is nothing to save
            self._end(signal.SIGTERM, "signalled at the start")
        for pid in pids:
            _send(pid, passed_on)

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        print(
            f"error[stopped]: the workers did not end within {self.patience + SECONDS_TO_END:g} s "
            "of a signal; they were killed. The last checkpoint is what counts.",
            file=sys.stderr,
        )
        self._end(signal.SIGKILL, "too slow")

    def _end(self, signum: signal.Signals, why: str) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        raise SignalException(why, sigval=signum)


def _send(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # it has just ended
        return
