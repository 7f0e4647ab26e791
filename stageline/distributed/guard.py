"""A thread of each rank that looks after it: is it alive, does the run go on, has another failed?

The main thread may wait inside gloo for as long as a timeout allows. This one never does: it beats
in the store of the run, ends the process when another rank has claimed the report of a failure,
reports a hang, carries a wish to stop to the other ranks, and ends what does not stop in time.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from stageline import progress
from stageline.distributed import stop
from stageline.distributed.board import claim_key, connect_store, disown_store, is_claim_filed
from stageline.distributed.failure import end_as_told, end_hung, end_lost, end_stopped
from stageline.distributed.failure_record import stages_here
from stageline.distributed.machines import (
    Machine,
    expect_tie,
    is_leaving,
    mark_tied,
    open_hub,
    reach_hub,
    this_machine,
)
from stageline.distributed.stop import (
    Process,
    has_launcher,
    keep_stacks_in,
    offer_stacks,
    remember,
    this_process,
    write_stacks,
)
from stageline.errors import HangError
from stageline.progress import Progress

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS_OF_SILENCE = 4.0  # a busy machine may keep a guard from its work for a while


@dataclass(frozen=True)
class Beat:
    """A sign of life, about twice a second.

    Attributes:
        number: counts the beats of a rank.
        place: what it does; `since` is of its own clock and says only whether something changed.
        age: seconds that it has done that.
    """

    rank: int
    number: int
    host: str
    machine: int
    stages: tuple[int, ...]
    process: Process
    place: Progress
    age: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Beat":
        told = json.loads(text)
        place, process = Progress(**told.pop("place")), Process(**told.pop("process"))
        return cls(place=place, process=process, stages=tuple(told.pop("stages")), **told)


@dataclass(frozen=True)
class HangVerdict:
    """Who is to blame for a hang.

    Attributes:
        why: "silent": its guard gives no sign; "busy": it does something, too long; "waiting": all
            ranks wait for each other, this one longest.
    """

    beat: Beat
    why: Literal["silent", "busy", "waiting"]


class Watcher:
    """Collects the beats of all ranks while one suspects that an operation takes over `limit` s."""

    def __init__(self, *, num_ranks: int, limit: float) -> None:
        self.num_ranks = num_ranks
        self.limit = limit
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its beat's number, and when
        self._alive: set[int] = set()
        self._began: float | None = None

    def see(self, beats: Mapping[int, Beat], now: float) -> HangVerdict | None:
        """Looks at the latest beats; a verdict as soon as there can be one."""
        self._began = now if self._began is None else self._began
        for rank, beat in beats.items():
            number, _ = self._heard.setdefault(rank, (beat.number, now))
            if beat.number != number:
                self._heard[rank] = beat.number, now
                self._alive.add(rank)
        silent = {
            rank for rank, (_, heard) in self._heard.items() if now - heard >= SECONDS_OF_SILENCE
        }
        is_sure = silent or now - self._began >= SECONDS_OF_SILENCE  # one may have no guard
        if len(self._alive) < self.num_ranks and not is_sure:
            return None
        return blame(beats, silent=silent, limit=self.limit)


def blame(beats: Mapping[int, Beat], *, silent: set[int], limit: float) -> HangVerdict | None:
    """Who is to blame; None while a rank still goes on, slowly.

    Args:
        beats: the latest of each rank.
        silent: ranks whose guard gives no sign of life: stopped, stuck in C, or gone.
        limit: seconds that an operation may take.
    """
    if silent:
        worst = max((beats[rank] for rank in silent), key=_not_waiting_then_oldest)
        return HangVerdict(worst, "silent")
    worst = max(beats.values(), key=_not_waiting_then_oldest)
    if worst.place.is_waiting:
        # one that began to wait a moment ago was at work before
        is_hang = all(beat.age >= limit for beat in beats.values())
    else:
        is_hang = worst.age >= limit
    if not is_hang:
        return None
    return HangVerdict(worst, "waiting" if worst.place.is_waiting else "busy")


def _not_waiting_then_oldest(beat: Beat) -> tuple[bool, float]:
    return not beat.place.is_waiting, beat.age


def describe(verdict: HangVerdict, beats: Mapping[int, Beat]) -> str:
    """The sentence of a report: what stands still, and who waits."""
    beat = verdict.beat
    rank = f"rank {beat.rank} (process {beat.process.pid} on {beat.host})"
    if verdict.why == "silent":
        what = (
            f"no sign of life from {rank}, last in {beat.place}: it was stopped, was killed, or "
            "hangs in code that holds Python's lock"
        )
    elif verdict.why == "busy":
        what = f"no progress for {beat.age:.0f} s in {beat.place} of {rank}"
    else:
        what = f"no progress for {beat.age:.0f} s: all ranks wait, {rank} longest, {beat.place}"
    waiting = [
        f"rank {other.rank} is {other.place}"
        for other in beats.values()
        if other.rank != beat.rank and other.place.is_waiting
    ]
    return "; ".join([what, *waiting[:3]])


SECONDS_BETWEEN_TRIALS = 0.2


def patiently_connect(lost_after: float) -> "Store":
    """The store is there before the ranks, unless rank 0 has to make it.

    Where a rank failed before there was one, this process ends.
    """
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + lost_after if agents_store and lost_after else float("inf")
    while True:
        try:
            return connect_store()
        except Exception:
            if time.monotonic() > deadline:
                raise
            end_if_filed()
            time.sleep(SECONDS_BETWEEN_TRIALS)


def end_if_filed() -> None:
    """Ends this process if another one of this machine failed before there was a store.

    Below a launcher the store is there before the ranks.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_alone or has_launcher() or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if is_claim_filed():
        disown_store()
        end_as_told()


class Lifeline:
    """A connection between this machine and the first one, which tells that the other is gone.

    Without it a rank whose neighbour's machine vanished would wait for the timeout of the group.

    Args:
        lost_after: seconds without a sign of life after which a machine is lost; 0: for ever.
    """

    def __init__(self, machine: Machine, lost_after: float) -> None:
        self.machine = machine
        self.lost_after = lost_after
        self.key = claim_key() + "/lifeline"
        # one process of a machine is enough: its launcher then ends the others
        self.is_tied = machine.count == 1 or os.environ.get("LOCAL_RANK", "0") != "0"
        if not self.is_tied:
            expect_tie()

    def tie(self, store: "Store") -> None:
        """Does nothing the second time, or where the first machine is not ready."""
        if self.is_tied:
            return
        how: dict[str, Any] = {"lost_after": self.lost_after, "on_lost": end_lost}
        if self.machine.index == 0:
            store.set(self.key, open_hub(self.machine, **how))
        elif store.check([self.key]):
            self._reach(store.get(self.key).decode(), how)
        else:
            return
        self.is_tied = True
        mark_tied()

    def _reach(self, invitation: str, how: dict[str, Any]) -> None:
        address = os.environ["MASTER_ADDR"]
        try:
            reach_hub(self.machine, address, invitation, **how)
        except OSError as error:
            print(
                f"warning: {self.machine} finds no way to a port of {address} ({error}). If a "
                "machine vanishes, this one will wait for the timeout of the exchange. Open all "
                "ports between the machines.",
                file=sys.stderr,
                flush=True,
            )


SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_UNTIL_TIED = 0.1
SECONDS_FOR_THE_LIFELINE = 4.0


@dataclass(frozen=True)
class GuardRules:
    """When the guard ends a run.

    Attributes:
        hang_timeout: seconds that one operation may take, from the first step on; 0: for ever.
        stop_deadline: seconds between a signal and the end of the step and its save; 0: for ever.
        lost_after: seconds without a sign of life after which a machine is lost; 0: for ever.
        folder: the run's folder, where the stacks of a run that hangs are kept.
    """

    hang_timeout: float = 0.0
    stop_deadline: float = 120.0
    lost_after: float = 30.0
    folder: Path | None = None


def start_guard(rules: GuardRules) -> None:
    """Starts the guard of this process."""
    guard = _Guard(rules)
    thread = threading.Thread(target=guard.run, name="guard", daemon=True)
    thread.start()

    def dismiss() -> None:  # a thread in the store's client must not meet the interpreter's end
        guard.dismissed.set()
        thread.join(SECONDS_BETWEEN_LOOKS)

    atexit.register(dismiss)


class _Guard:
    store: "Store"  # a connection of its own

    def __init__(self, rules: GuardRules) -> None:
        self.rules = rules
        self.dismissed = threading.Event()
        self.key = claim_key()
        self.machine = this_machine()
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.lifeline = Lifeline(self.machine, rules.lost_after)
        self.process = this_process(stacks_fd=offer_stacks())
        keep_stacks_in(rules.folder)
        self.num_beats = 0
        self.knows_all = False
        self.has_told_stop = False
        self.watcher: Watcher | None = None

    def run(self) -> None:
        """Returns when the run ends as it should."""
        try:
            from torch.distributed import HashStore  # slow to import: only where it is needed

            is_alone = self.num_ranks == 1  # a lone process hears itself
            self.store = HashStore() if is_alone else patiently_connect(self.rules.lost_after)
            while not self._is_over():
                end_if_filed()
                self._look()
                is_tied = self.lifeline.is_tied
                self.dismissed.wait(SECONDS_BETWEEN_LOOKS if is_tied else SECONDS_UNTIL_TIED)
        except Exception as error:
            time.sleep(SECONDS_FOR_THE_LIFELINE)  # it tells better who was lost
            if not self._is_over() and (self.machine.count == 1 or self.machine.index):
                end_lost("the first machine", f"its store does not answer ({error})")

    def _is_over(self) -> bool:
        return self.dismissed.is_set() or is_leaving() or stop.is_ending()

    def _look(self) -> None:
        self.store.set(self._beat_of(self.rank), self._beat().to_json())
        if self.store.check([self.key]):  # the claim of the rank that failed first
            claim = json.loads(self.store.get(self.key))
            if claim["code"] == HangError.exit_code:
                write_stacks()
            end_as_told()
        self._carry_stop()
        self.lifeline.tie(self.store)
        self._meet_neighbours()
        self._check_progress()
        self._check_deadline()

    def _beat(self) -> Beat:
        self.num_beats += 1
        place = progress.where()
        return Beat(
            rank=self.rank,
            number=self.num_beats,
            host=self.machine.host,
            machine=self.machine.index,
            stages=tuple(stages_here),
            process=self.process,
            place=place,
            age=time.monotonic() - place.since,
        )

    def _beat_of(self, rank: int) -> str:
        return f"{self.key}/beat/{rank}"

    def _beats(self) -> dict[int, Beat]:
        """The latest beat of each rank that has sent one."""
        names = {rank: self._beat_of(rank) for rank in range(self.num_ranks)}
        return {
            rank: Beat.from_json(self.store.get(name).decode())
            for rank, name in names.items()
            if self.store.check([name])
        }

    def _carry_stop(self) -> None:
        """A signal to one rank is one to all."""
        asked, name = stop.asked(), f"{self.key}/stop"
        if asked is None:
            if self.store.check([name]):
                stop.ask(int(self.store.get(name)))
        elif not self.has_told_stop:
            self.store.set(name, str(asked[0]))
            self.has_told_stop = True

    def _meet_neighbours(self) -> None:
        """Learns the process numbers of this machine, before a store can be lost."""
        if self.knows_all:
            return
        here = [b for b in self._beats().values() if b.machine == self.machine.index]
        remember(beat.process for beat in here if beat.rank != self.rank)
        self.knows_all = len(here) == self.machine.num_ranks

    def _check_progress(self) -> None:
        """Judges once this rank's own operation is too old; slow ranks get on meanwhile."""
        place, limit = progress.where(), self.rules.hang_timeout
        now = time.monotonic()
        if not limit or place.step is None or now - place.since < limit:
            self.watcher = None
            return
        if self.watcher is None:
            self.watcher = Watcher(num_ranks=self.num_ranks, limit=limit)
        beats = self._beats()
        verdict = self.watcher.see(beats, now)
        if verdict is not None:
            self._report_hang(verdict, beats)

    def _report_hang(self, verdict: HangVerdict, beats: dict[int, Beat]) -> NoReturn:
        what = describe(verdict, beats)
        folder = write_stacks()
        stacks = f" The stacks of the ranks are in {folder}." if folder else ""
        end_hung(
            f"{what}. If it is only slow, raise `hang_timeout` {self.rules.hang_timeout:g} above "
            f"the longest pass, compile or save; else look at what it waits for.{stacks}",
            rank=verdict.beat.rank,
            stages=verdict.beat.stages,
            # the last beat of a rank that hangs may be older than its step
            where=replace(verdict.beat.place, step=progress.where().step),
        )

    def _check_deadline(self) -> None:
        asked, limit = stop.asked(), self.rules.stop_deadline
        if asked is None or not limit or time.monotonic() - asked[1] < limit:
            return
        end_stopped(
            f"{stop.name_of(asked[0])} asked for a stop {limit:g} s ago, and the step and its save "
            f"have not ended (this rank: {progress.where()}). The last checkpoint is what counts. "
            "If saving takes longer, raise `stop_deadline`.",
            stop.stop_code(),
            kind="stopped",
        )
