"""Starts a run again by itself when a rank or a card is lost, and on more ranks when cards return.

Decides only: which failures are worth a new start, on how many ranks, and when it is enough. What
starts processes is launch.py; which numbers of ranks have a plan is told by the caller.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stageline.errors import CRASH, HangError, UserError, spelled
from stageline.run_records import last_trained

# another start would end as this one did for any other code: wrong options, bad rows, a full disk
WORTH_ANOTHER_START = (CRASH, HangError.exit_code)
MAX_WITHOUT_PROGRESS = 3  # restarts in a row that do no further step
SECONDS_BETWEEN_LOOKS = 60.0  # for cards that are back
SECONDS_OF_A_PROBE = 90.0  # a card that is lost may hang its driver
_PROBE = (
    "import torch; kind = torch.accelerator.current_accelerator(); "
    "x = torch.ones(64, device=kind); assert kind and float(x @ x) == 64.0"
)


@dataclass(frozen=True)
class Ended:
    """How a start of the workers ended.

    Attributes:
        is_asked: somebody asked the launcher for a stop.
        makes_room: the launcher asked for it itself, to start on more ranks; all was saved.
    """

    code: int
    is_asked: bool = False
    makes_room: bool = False


class Devices(Protocol):
    """Which devices of this machine a run may compute on."""

    variable: str  # of the environment; it shows a process some of them alone

    def usable(self, *, is_sure: bool) -> list[str] | None:
        """Their names for `variable`; None: as many ranks as one likes.

        Args:
            is_sure: only those that compute when tried; else those that the driver lists.
        """


class Accelerators:
    """Those of this machine that the run may see.

    Args:
        device: see `stageline.device.accelerators`, which is asked at the first start.
        num_ranks: of the run; a card may be there only later.
    """

    listed: list[str] | None

    def __init__(self, device: str, *, num_ranks: int) -> None:
        from stageline.device import accelerators, visible  # late: it imports torch

        self.variable, self.listed = "", None
        if found := accelerators(device):
            self.variable, self.listed = visible(found)
            is_given = bool(os.environ.get(self.variable))
            more = range(len(found), 0 if is_given else num_ranks)  # they may come back
            self.all = self.listed + [str(index) for index in more]

    def usable(self, *, is_sure: bool) -> list[str] | None:
        """As `Devices` says."""
        if self.listed is None or not is_sure:
            return self.listed
        return computing(self.all, self.variable)


def computing(names: list[str], variable: str, *, seconds: float = SECONDS_OF_A_PROBE) -> list[str]:
    """Those on which a process that `variable` shows one alone gets a right sum."""
    probes = {
        name: subprocess.Popen(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, variable: name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in names
    }
    deadline = time.monotonic() + seconds
    found = []
    for name, probe in probes.items():
        try:
            if probe.wait(max(0.0, deadline - time.monotonic())) == 0:
                found.append(name)
        except subprocess.TimeoutExpired:
            probe.kill()  # it is not waited for: the driver may hold it for ever
    return found


@dataclass
class Elastic:
    """When a run starts again, and on how many ranks.

    Args:
        num_ranks: that the run is to have.
        fitting: gives the largest number of ranks, up to another one, that has a plan; 0: none.
        max_restarts: after failures; a start on more ranks is not counted.
        folder: of the run.
    """

    num_ranks: int
    fitting: Callable[[int], int]
    max_restarts: int
    folder: Path
    devices: Devices
    num_restarts: int = field(default=0, init=False)
    _reached: list[tuple[int, str]] = field(default_factory=list, init=False)

    def choose_ranks(self, *, is_sure: bool) -> int:
        """The ranks of the next start; the processes see its cards alone.

        Raises:
            UserError: no number of ranks that are left has a plan.
        """
        names, left = self._left(is_sure=is_sure)
        count = self.fitting(left)
        if not count:
            raise UserError(
                f"{left} of {self.num_ranks} devices are left, and the model has no plan of stages "
                "for so few: more were expected. Mend or add cards and give the same command "
                f"again; it goes on from the last checkpoint in {self.folder}."
            )
        if names is not None:
            os.environ[self.devices.variable] = ",".join(names[:count])
        return count

    def has_more(self, count: int, *, since: float) -> bool:
        """Whether a start on more ranks than `count` is possible, and now is a time for it.

        Args:
            since: when the workers were started (`time.time`): they are left alone until they have
                done a step.
        """
        last = None if count == self.num_ranks else last_trained(self.folder / "log.jsonl")
        if last is None or last["time"] <= since:
            return False
        _, left = self._left(is_sure=True)
        return self.fitting(left) > count

    def _left(self, *, is_sure: bool) -> tuple[list[str] | None, int]:
        """The usable devices, as `Devices` tells them, and the most ranks that they carry."""
        names = self.devices.usable(is_sure=is_sure)
        return names, self.num_ranks if names is None else min(self.num_ranks, len(names))

    def why_no_restart(self, ended: Ended) -> str | None:
        """Why the run ends here; "" where nobody need be told; None: it starts again."""
        if ended.is_asked or ended.code not in WORTH_ANOTHER_START:
            return ""
        self._reached.append(reached(self.folder))
        last = self._reached[-MAX_WITHOUT_PROGRESS - 1 :]
        if len(last) > MAX_WITHOUT_PROGRESS and len(set(last)) == 1:
            return (
                f"it has failed at step {last[0][0]} {len(last)} times in a row, another start "
                "would too. Look at what the reports above have in common."
            )
        if self.num_restarts >= self.max_restarts:
            return f"{self.num_restarts} restarts are done, no more were allowed (`max_restarts`)."
        return None


def reached(folder: Path) -> tuple[int, str]:
    """How far a run has come: its last logged step, and the name of its newest checkpoint."""
    last = last_trained(folder / "log.jsonl")
    saved = (path.name for path in (folder / "checkpoints").glob("step-*"))
    newest = max((name for name in saved if name[len("step-") :].isdigit()), default="")
    return (last["step"] if last else 0), newest


def run_elastic(start: Callable[[int, Callable[[], bool]], Ended], elastic: Elastic) -> int:
    """Starts the workers until the run has ended for good.

    Args:
        start: runs so many workers to their end; asks them now and then, by what it gets, whether
            to save and end for a start on more ranks.

    Returns:
        The exit code of the run.

    Raises:
        UserError: too few devices are left.
    """
    before = elastic.num_ranks
    while True:
        count = elastic.choose_ranks(is_sure=elastic.num_restarts > 0)
        if count != before:
            cards = os.environ.get(elastic.devices.variable, "")
            on = f", cards {cards}" if cards else ""
            tell(f"starts on {count} of {elastic.num_ranks} ranks{on}")
        before, since = count, time.time()
        ended = start(count, functools.partial(elastic.has_more, count, since=since))
        if ended.makes_room and not ended.is_asked:
            tell("cards are back; everything was saved")
            continue
        why = elastic.why_no_restart(ended)
        if why is not None:
            if why:
                tell(f"the run ends: {why}")
            return ended.code
        elastic.num_restarts += 1
        tell(f"restart {elastic.num_restarts} of {elastic.max_restarts}")


def tell(text: str) -> None:
    """A line of the launcher."""
    print(f"elastic: {spelled(text)}", file=sys.stderr, flush=True)
