"""A thread of each rank that ends it when nothing else would.

That is after its launcher, when an operation hangs, and when a stop takes too long. The main thread
may wait inside gloo for as long as a timeout allows; this one never does.
"""

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

from stageline import progress
from stageline.distributed import failure_record, stop
from stageline.distributed.failure import end_hung, end_stopped
from stageline.distributed.failure_record import LAUNCHER
from stageline.errors import CRASH

SECONDS_BETWEEN_LOOKS = 0.5
MOST_SECONDS_TO_WAIT = 120.0


@dataclass(frozen=True)
class WatchdogRules:
    """Time limits after which a rank ends.

    Attributes:
        hang_timeout: seconds that one operation may take, from the first step on; 0: no limit.
            A rank that waits for another one gets twice as many, at most 120 s more: the other one,
            which hangs, should report.
        stop_deadline: seconds between a signal and the end of the step and its save; 0: no limit.
    """

    hang_timeout: float = 0.0
    stop_deadline: float = 120.0


def start_watchdog(rules: WatchdogRules) -> None:
    """Start the watchdog of this process, which ends it at once if its launcher has ended."""
    launcher = None
    if LAUNCHER in os.environ:
        launcher = int(os.environ[LAUNCHER])
        stop.die_with_parent()
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
    threading.Thread(target=_watch, args=(rules, launcher), name="watchdog", daemon=True).start()


def _watch(rules: WatchdogRules, launcher: int | None) -> None:
    while not stop.is_ending():
        if launcher not in (None, os.getppid()):
            os._exit(CRASH)
        if rules.hang_timeout:
            _check_progress(rules.hang_timeout)
        if rules.stop_deadline:
            _check_deadline(rules.stop_deadline)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _check_progress(limit: float) -> None:
    place = progress.where()
    if place.step is None:
        return
    age = time.monotonic() - place.since
    # in C, so that the stacks are written also where a thread holds Python's lock
    failure_record.write_stacks_after(limit - age)
    most = limit + SECONDS_BETWEEN_LOOKS
    if place.is_waiting:
        most += min(limit, MOST_SECONDS_TO_WAIT)
    if age < most:
        return
    what = f"in {place} (process {os.getpid()} on {socket.gethostname()})"
    if place.is_waiting:
        what = f"{place}: the rank that sends it was stopped or holds Python's lock, or all wait"
    end_hung(
        f"no progress for {age:.0f} s {what}. If it is only slow, raise `hang_timeout` {limit:g} "
        "above the longest pass, compile or save; else see the stacks of the ranks"
        f"{failure_record.where_stacks_are()}.",
        where=place,
    )


def _check_deadline(limit: float) -> None:
    asked = stop.asked()
    if asked is None or time.monotonic() - asked[1] < limit:
        return
    end_stopped(
        f"{signal.Signals(asked[0]).name} asked for a stop {limit:g} s ago, and the step and its "
        f"save have not ended (this rank: {progress.where()}). The last checkpoint is what counts. "
        "If saving takes longer, raise `stop_deadline`.",
        stop.stop_code(),
        kind="stopped",
    )
