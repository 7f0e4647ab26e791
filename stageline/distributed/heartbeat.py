"""What each rank tells of itself, about twice a second, and who is to blame when nothing goes on.

Pure: knows neither the store nor the clock of another machine.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from stageline.distributed.neighbours import Process
from stageline.progress import Place

# a busy machine may keep a guard from its work for a while
SECONDS_OF_SILENCE = 4.0


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        number: counts the beats of a rank.
        machine: number of its machine.
        stages: of the model, that it runs.
        place: what it does; `since` is of its own clock and says only whether something changed.
        age: seconds that it has done that.
    """

    rank: int
    number: int
    host: str
    machine: int
    stages: tuple[int, ...]
    process: Process
    place: Place
    age: float

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Beat":
        """What `to_json` gave."""
        told = json.loads(text)
        place, process = Place(**told.pop("place")), Process(**told.pop("process"))
        return cls(place=place, process=process, stages=tuple(told.pop("stages")), **told)


@dataclass(frozen=True)
class Verdict:
    """Who is to blame for a hang.

    Attributes:
        why: "silent": its guard gives no sign; "busy": it does something, too long; "waiting": all
            ranks wait for each other, this one longest.
    """

    beat: Beat
    why: Literal["silent", "busy", "waiting"]


class Watcher:
    """Collects the beats of all ranks while one of them suspects that nothing goes on.

    Args:
        limit: seconds that an operation may take.
    """

    def __init__(self, *, num_ranks: int, limit: float) -> None:
        self.num_ranks = num_ranks
        self.limit = limit
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its beat's number, and when
        self._alive: set[int] = set()
        self._began: float | None = None

    def see(self, beats: Mapping[int, Beat], now: float) -> Verdict | None:
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


def blame(beats: Mapping[int, Beat], *, silent: set[int], limit: float) -> Verdict | None:
    """Who is to blame; None while a rank still goes on, slowly.

    Args:
        beats: the latest of each rank.
        silent: ranks whose guard gives no sign of life: stopped, stuck in C, or gone.
        limit: seconds that an operation may take.
    """
    if silent:
        worst = max((beats[rank] for rank in silent), key=_not_waiting_then_oldest)
        return Verdict(worst, "silent")
    worst = max(beats.values(), key=_not_waiting_then_oldest)
    if worst.place.is_waiting:
        # one that began to wait a moment ago was at work before
        is_hang = all(beat.age >= limit for beat in beats.values())
    else:
        is_hang = worst.age >= limit
    if not is_hang:
        return None
    return Verdict(worst, "waiting" if worst.place.is_waiting else "busy")


def _not_waiting_then_oldest(beat: Beat) -> tuple[bool, float]:
    return not beat.place.is_waiting, beat.age


def describe(verdict: Verdict, beats: Mapping[int, Beat], *, seconds: float) -> str:
    """The sentence of a report: what stands still, and who waits."""
    beat = verdict.beat
    rank = f"rank {beat.rank} (process {beat.process.pid} on {beat.host})"
    if verdict.why == "silent":
        what = (
            f"no sign of life from {rank}, last in {beat.place}: it was stopped, was killed, or "
            "hangs in code that holds Python's lock"
        )
    elif verdict.why == "busy":
        what = f"no progress for {seconds:.0f} s in {beat.place} of {rank}"
    else:
        what = f"no progress for {seconds:.0f} s: all ranks wait, {rank} longest, {beat.place}"
    waiting = [
        f"rank {other.rank} is {other.place}"
        for other in beats.values()
        if other.rank != beat.rank and other.place.is_waiting
    ]
    return "; ".join([what, *waiting[:3]])
