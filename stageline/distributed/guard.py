"""A thread of each rank that looks after it: is it alive, does the run go on, has another failed?

The main thread may wait inside gloo for as long as a timeout allows. This one never does: it beats
in the store of the run, ends the process when another rank has claimed the report of a failure,
reports a hang, carries a wish to stop to the other ranks, and ends what does not stop in time.
"""

import atexit
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from stageline import progress
from stageline.distributed import stop
from stageline.distributed.bulletin import Bulletin, OwnBulletin
from stageline.distributed.failure import end_as_told, end_hung, end_lost, end_overdue
from stageline.distributed.heartbeat import Beat, Verdict, Watcher, describe
from stageline.distributed.lifeline import is_leaving
from stageline.distributed.machines import this_machine
from stageline.distributed.neighbours import remember, this_process
from stageline.distributed.record import own_stages
from stageline.distributed.stacks import keep_stacks_in, offer_stacks, write_stacks
from stageline.distributed.watch import Lifeline, end_if_filed, patiently_connect
from stageline.errors import HangError

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
    # a thread inside the store's client must not meet the end of the interpreter
    atexit.register(lambda: (guard.dismissed.set(), thread.join(SECONDS_BETWEEN_LOOKS)))


class _Guard:
    def __init__(self, rules: GuardRules) -> None:
        self.rules = rules
        self.dismissed = threading.Event()
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
            bulletin = self._bulletin()
            while not self._is_over():
                end_if_filed()
                self._look(bulletin)
                is_tied = self.lifeline.is_tied
                self.dismissed.wait(SECONDS_BETWEEN_LOOKS if is_tied else SECONDS_UNTIL_TIED)
        except Exception as error:
            time.sleep(SECONDS_FOR_THE_LIFELINE)  # it tells better who was lost
            if not self._is_over() and (self.machine.count == 1 or self.machine.index):
                end_lost("the first machine", f"its store does not answer ({error})")

    def _bulletin(self) -> Bulletin | OwnBulletin:
        if self.num_ranks == 1:
            return OwnBulletin()
        return Bulletin(patiently_connect(self.rules.lost_after), num_ranks=self.num_ranks)

    def _is_over(self) -> bool:
        return self.dismissed.is_set() or is_leaving() or stop.is_ending()

    def _look(self, bulletin: Bulletin | OwnBulletin) -> None:
        bulletin.post(self._beat())
        claim = bulletin.claim()
        if claim is not None:
            self._leave_as_told(claim)
        self._carry_stop(bulletin)
        if isinstance(bulletin, Bulletin):
            self.lifeline.tie(bulletin.store)
            self._meet_neighbours(bulletin)
        self._check_progress(bulletin)
        self._check_deadline()

    def _beat(self) -> Beat:
        self.num_beats += 1
        place = progress.place()
        return Beat(
            rank=self.rank,
            number=self.num_beats,
            host=self.machine.host,
            machine=self.machine.index,
            stages=own_stages(),
            process=self.process,
            place=place,
            age=time.monotonic() - place.since,
        )

    def _leave_as_told(self, claim: dict) -> NoReturn:
        if claim["code"] == HangError.exit_code:
            write_stacks()
        end_as_told()

    def _carry_stop(self, bulletin: Bulletin | OwnBulletin) -> None:
        """A signal to one rank is one to all."""
        asked = stop.asked()
        if asked is None:
            signum = bulletin.asked()
            if signum is not None:
                stop.ask(signum)
        elif not self.has_told_stop:
            bulletin.ask(asked[0])
            self.has_told_stop = True

    def _meet_neighbours(self, bulletin: Bulletin) -> None:
        """Learns the process numbers of this machine, before a store can be lost."""
        if self.knows_all:
            return
        here = [b for b in bulletin.beats().values() if b.machine == self.machine.index]
        remember(beat.process for beat in here if beat.rank != self.rank)
        self.knows_all = len(here) == self.machine.num_ranks

    def _check_progress(self, bulletin: Bulletin | OwnBulletin) -> None:
        """Judges once this rank's own operation is too old; slow ranks get on meanwhile."""
        place, limit = progress.place(), self.rules.hang_timeout
        now = time.monotonic()
        if not limit or place.step is None or now - place.since < limit:
            self.watcher = None
            return
        if self.watcher is None:
            self.watcher = Watcher(num_ranks=self.num_ranks, limit=limit)
        beats = bulletin.beats()
        verdict = self.watcher.see(beats, now)
        if verdict is not None:
            self._report_hang(verdict, beats, seconds=now - place.since)

    def _report_hang(self, verdict: Verdict, beats: dict[int, Beat], *, seconds: float) -> NoReturn:
        seconds = seconds if verdict.why == "silent" else verdict.beat.age
        what = describe(verdict, beats, seconds=seconds)
        folder = write_stacks()
        stacks = f" The stacks of the ranks are in {folder}." if folder else ""
        end_hung(
            f"{what}. If it is only slow, raise --hang-timeout {self.rules.hang_timeout:g} above "
            f"the longest pass, compile or save; else look at what it waits for.{stacks}",
            rank=verdict.beat.rank,
            stages=verdict.beat.stages,
            # the last beat of a rank that hangs may be older than its step
            where=replace(verdict.beat.place, step=progress.place().step),
        )

    def _check_deadline(self) -> None:
        asked, limit = stop.asked(), self.rules.stop_deadline
        if asked is None or not limit or time.monotonic() - asked[1] < limit:
            return
        end_overdue(
            f"{stop.name_of(asked[0])} asked for a stop {limit:g} s ago, and the step and its save "
            f"have not ended (this rank: {progress.place()}). The last checkpoint is what counts. "
            "If saving takes longer, raise --stop-deadline.",
            stop.stop_code(),
        )
