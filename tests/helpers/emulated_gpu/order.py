"""The order of events on streams and on the host: vector clocks, and the races they show.

A race is a use of memory that nothing orders behind another use of which one writes, or behind
its allocation. Values are right here in any case, because the emulator computes at once; on a
card such a program is wrong now and then. The threads of the host count as one actor: what one
thread hands to another is in order.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Actor = tuple[int, int] | str  # (card, stream), or the host
Part = tuple[int, int, int]  # the key of a storage, its first byte and the one after the last
Clock = dict[Actor, int]  # actor -> the last of its works that is known to be done
HOST = "the host"
Told = Callable[[], str]


class Use(NamedTuple):
    """One work's use of memory: the `time`-th work of its actor."""

    actor: Actor
    time: int
    told: Told

    def __str__(self) -> str:
        return f"{told_actor(self.actor)} ({self.told()})"


@dataclass
class Memory:
    """The uses of one storage that a later use must come behind.

    Attributes:
        owner: the stream whose allocator it goes back to; None for memory of the host.
        recorded: streams that the allocator waits for (`record_stream`).
    """

    owner: Actor | None
    written: list[tuple[Part, Use]] = field(default_factory=list)
    read: list[tuple[Part, Use]] = field(default_factory=list)
    recorded: set[Actor] = field(default_factory=set)


class Order:
    """A record of works, events and waits; `races` counts what is out of order, by its sentence."""

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self._clocks: dict[Actor, Clock] = {}
        self._events: dict[Hashable, Clock] = {}
        self._memory: dict[int, Memory] = {}
        self._lock = threading.RLock()

    def work(self, actor: Actor, reads: Iterable[Part], writes: Iterable[Part], told: Told) -> None:
        """Record a use of memory; a stream's work follows all that the host knows."""
        with self._lock:
            clock = self._clock(actor)
            if actor != HOST:
                _join(clock, self._clock(HOST))
            clock[actor] = clock.get(actor, 0) + 1
            use = Use(actor, clock[actor], told)
            writes = set(writes)
            for part in writes.union(reads):
                if part[0] in self._memory:
                    self._touch(part, use, clock, is_write=part in writes)

    def allocate(self, key: int, owner: Actor | None) -> None:
        """Follow memory under `key`."""
        with self._lock:
            self._memory[key] = Memory(owner)

    def record_stream(self, key: int, actor: Actor) -> None:
        """Record that the allocator will wait for what the stream does with this memory."""
        with self._lock:
            if key in self._memory:
                self._memory[key].recorded.add(actor)

    def free(self, key: int) -> None:
        """Check that all uses come before the owner's next allocation, maybe at the same place."""
        with self._lock:
            memory = self._memory.pop(key, None)
            if memory is None or memory.owner is None:
                return
            clock = dict(self._clock(memory.owner))
            _join(clock, self._clock(HOST))
            for _, use in [*memory.read, *memory.written]:
                is_safe = use.actor in memory.recorded or use.actor in (memory.owner, HOST)
                if not is_safe and clock.get(use.actor, 0) < use.time:
                    self.races[
                        f"memory of {told_actor(memory.owner)} is free while {use} uses it"
                    ] += 1

    def record(self, event: Hashable, actor: Actor) -> None:
        """Record an event after all that the stream was given so far."""
        with self._lock:
            clock = self._clock(actor)
            _join(clock, self._clock(HOST))
            self._events[event] = dict(clock)

    def wait(self, actor: Actor, event: Hashable) -> None:
        """Order later work of the actor after an event."""
        with self._lock:
            _join(self._clock(actor), self._events.get(event, {}))

    def join(self, actor: Actor, other: Actor | None = None) -> None:
        """Order later work of the actor after all work so far of another one, or of all others."""
        with self._lock:
            clock = self._clock(actor)
            for each in list(self._clocks) if other is None else [other]:
                _join(clock, self._clock(each))

    def _clock(self, actor: Actor) -> Clock:
        return self._clocks.setdefault(actor, {})

    def _touch(self, part: Part, use: Use, clock: Clock, *, is_write: bool) -> None:
        memory, (_, first, end) = self._memory[part[0]], part
        actor, does = use.actor, "writes" if is_write else "reads"
        kept: list[list[tuple[Part, Use]]] = []  # a later use must come behind these, too
        for uses, did in ((memory.read, "reads"), (memory.written, "writes")):
            left: list[tuple[Part, Use]] = []
            kept.append(left)
            for each in uses:
                (_, other_first, other_end), earlier = each
                is_own = earlier.actor == actor
                if not is_own and (is_write or did == "writes"):
                    if first < other_end and other_first < end:
                        self._check(use, earlier, clock, does, did)
                is_covered = first <= other_first and other_end <= end
                if not is_covered or not (is_write or (is_own and did == "reads")):
                    left.append(each)
        memory.read, memory.written = kept
        (memory.written if is_write else memory.read).append((part, use))

    def _check(self, use: Use, before: Use, clock: Clock, does: str, did: str) -> None:
        if clock.get(before.actor, 0) < before.time:
            self.races[f"{use} {does} what {before} {did}, and waits for nothing"] += 1


def told_actor(actor: Actor) -> str:
    """Return the name of an actor in words."""
    return actor if isinstance(actor, str) else f"stream {actor[1]} of card {actor[0]}"


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time
