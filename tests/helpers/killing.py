"""Kills ranks of a small run at random moments, as the system's memory killer would.

A moment is drawn from all that a run goes through: its start, steps, the copying of a checkpoint,
its writing in the background, its publishing. The current phase is seen from outside, by the
files.
"""

import hashlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stageline.checkpoint.layout import MANIFEST, verify
from stageline.checkpoint.writer import step_folders, step_name
from tests.helpers.small_run import ForkedRun

MOMENTS = ("start", "step", "copy", "write", "publish")
_DRAFT = re.compile(r"step-(\d{8})\.tmp-")
_SECONDS_BETWEEN_LOOKS = 0.0005
_SECONDS_TO_LEARN = 0.3


class Running(Protocol):
    """A run whose ranks can be killed: forked, or below a torchrun that restarts them."""

    pids: dict[int, int]

    def is_running(self) -> bool: ...


class RunFolder:
    """The state of a run as seen from outside, in its --output-dir."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.jsonl"
        self.checkpoints = folder / "checkpoints"

    def num_lines(self) -> int:
        """Return lines of the log, of all starts together."""
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def newest(self) -> int:
        """Return the step of the newest folder that is called a checkpoint; 0: there is none."""
        return next((step for step, _ in step_folders(self.checkpoints)), 0)

    def draft(self) -> Path | None:
        """The folder in which a checkpoint is being written; not one that is being removed."""
        newest = self.newest()
        for path in self.checkpoints.glob("*.tmp-*"):
            match = _DRAFT.match(path.name)
            if match and int(match[1]) > newest:
                return path
        return None

    def phase(self, lines_at_start: int) -> str:
        """Return the current phase of the run: start, write, publish or step."""
        if self.num_lines() == lines_at_start:
            return "start"
        draft = self.draft()
        if draft is None:
            return "step"
        return "publish" if (draft / MANIFEST).exists() else "write"

    def check(self) -> None:
        """Check that every folder with the name of a checkpoint is whole."""
        for _, path in step_folders(self.checkpoints):
            verify(path)


@dataclass(frozen=True)
class Kill:
    """One kill."""

    moment: str  # the moment that was waited for
    phase: str  # the phase of the run, as its folder showed it
    rank: int
    at: float  # on the clock of `time.monotonic`
    seconds_down: float = 0.0  # until all ranks were gone
    seconds_back: float | None = None  # until the next start had done a step; None: none was done
    newest: int = 0  # step of the last checkpoint that was left
    time: float = 0.0  # seconds since the epoch


class Killer:
    """A random choice of the rank to kill and the moment.

    Args:
        total_steps: of the run; towards the end only moments are drawn that come before a save,
            so that a run of few steps can be killed often.
        seconds_to_start: until the first step, about.
    """

    def __init__(
        self, seed: int, folder: RunFolder, *, total_steps: int, seconds_to_start: float
    ) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.total_steps = total_steps
        self.seconds_to_start = seconds_to_start
        self.done: list[Kill] = []

    def kill(self, run: Running) -> str:
        """Waits for a random moment, kills a random rank with signal 9; returns what it was at."""
        lines = self.folder.num_lines()
        is_near_end = self.folder.newest() >= self.total_steps - 12
        moment = self.random.choice(MOMENTS[:1] if is_near_end else MOMENTS)
        self._wait_for(moment, run, lines)
        assert run.is_running(), f"ended before kill {len(self.done) + 1}"
        pids = run.pids
        rank = self.random.choice(sorted(pids))
        os.kill(pids[rank], signal.SIGKILL)
        phase = self.folder.phase(lines)
        self.done.append(Kill(moment, phase, rank, time.monotonic(), time=time.time()))
        return phase

    def check(self) -> None:
        """Check, when all ranks are gone, that what was saved before is there, and whole."""
        seconds = time.monotonic() - self.done[-1].at
        self.folder.check()
        newest = self.folder.newest()
        assert newest >= max(kill.newest for kill in self.done), "a checkpoint was lost"
        self.done[-1] = replace(self.done[-1], seconds_down=seconds, newest=newest)

    def _note_step(self) -> None:
        if self.done:
            seconds = time.monotonic() - self.done[-1].at
            self.done[-1] = replace(self.done[-1], seconds_back=seconds)

    def _wait_for(self, moment: str, run: Running, lines: int) -> None:
        folder = self.folder
        if moment == "start":
            end = time.monotonic() + self.random.uniform(0, self.seconds_to_start)
            # a quick start is over before: the first step is the last moment of it
            _look_until(lambda: time.monotonic() > end or folder.num_lines() > lines, run)
            return
        _look_until(lambda: folder.num_lines() > lines, run)
        self._note_step()
        wanted = lines + self.random.randint(1, 4)
        _look_until(lambda: folder.num_lines() >= wanted, run)
        is_there: dict[str, Callable[[], bool]] = {
            "step": lambda: True,
            "copy": lambda: folder.num_lines() >= wanted + 1,  # logged, then copied
            "write": lambda: folder.draft() is not None,
            "publish": lambda: (d := folder.draft()) is not None and (d / MANIFEST).exists(),
        }
        _look_until(is_there[moment], run)
        longest = {"step": 0.1, "copy": 0.01, "write": 0.08, "publish": 0.002}[moment]
        time.sleep(self.random.uniform(0, longest))


def last_tensors(folder: RunFolder, step: int) -> dict[str, str]:
    """File -> hash of what a checkpoint holds of weights and optimizer state."""
    checkpoint = folder.checkpoints / step_name(step)
    return {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*.safetensors")
    }


def _look_until(is_true: Callable[[], bool], run: Running) -> None:
    while not is_true() and run.is_running():
        time.sleep(_SECONDS_BETWEEN_LOOKS)


class LaunchedRun:
    """A run below a torchrun that restarts it; its ranks are found in the table of processes."""

    def __init__(self, words: list[str], output: Path, *, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.before: set[int] = set()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with output.open("w") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    @property
    def pids(self) -> dict[int, int]:
        """rank -> process, of those that run now."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if _parent(path) == self.process.pid:
                    found[int(_environment(path)["RANK"])] = int(path.name)
            except (OSError, KeyError, ValueError, IndexError):
                continue  # it is ending, or belongs to another run
        return found

    def is_running(self) -> bool:
        """Whether the launcher has not ended."""
        return self.process.poll() is None

    def wait_for_new_ranks(self) -> None:
        """Waits until all ranks are others than at the last call."""
        pids: set[int] = set()
        while self.is_running() and (len(pids) < self.num_ranks or pids & self.before):
            time.sleep(0.02)
            pids = set(self.pids.values())
        self.before = pids


def _parent(process: Path) -> int:
    # after the name, which may hold anything: state, parent
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[1])


def _environment(process: Path) -> Mapping[str, str]:
    words = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _end_start(run: ForkedRun) -> None:
    """Kill all ranks, as a launcher does: those that have not met cannot learn that one is gone."""
    end = time.monotonic() + _SECONDS_TO_LEARN
    _look_until(lambda: time.monotonic() > end, run)
    for pid in run.pids.values():
        os.kill(pid, signal.SIGKILL)


def kill_by_hand(
    start: Callable[[int], ForkedRun], killer: Killer, *, kills: int, limit: float = 30.0
) -> None:
    """Start a run again and again, and kill one of its ranks each time; then let it end.

    Args:
        start: begins or resumes the run, given how often it was killed.
        limit: seconds in which the other ranks must be gone.
    """
    for count in range(kills):
        run = start(count)
        if killer.kill(run) == "start":
            _end_start(run)
        finished = run.wait(limit)
        assert -signal.SIGKILL in run.codes, finished
        killer.check()
    finished = start(kills).wait(120)
    assert finished.code == 0, finished


def kill_below_launcher(run: LaunchedRun, killer: Killer, *, kills: int) -> None:
    """Kill one rank after another, each in another start; then let the run end."""
    run.wait_for_new_ranks()
    for _ in range(kills):
        killer.kill(run)
        while run.before & set(run.pids.values()):
            time.sleep(0.02)
        killer.check()
        run.wait_for_new_ranks()
    assert run.process.wait(300) == 0
