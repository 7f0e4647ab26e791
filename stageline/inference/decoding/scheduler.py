"""The order in which sequences are answered, and in which groups: no model, no tensors.

A sequence waits, is read (prefill) into a group, and gets a token each time its group takes a step.
A finished one makes room at once for one that waits. A long prompt is read in pieces, which follow
one another through the stages; groups take steps in between.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stageline.inference.decoding.cache import take_out

ROOM_TO_WAIT_FOR = 8  # an eighth of all rows
LEAST_TOKENS = 128  # smaller passes over prompts cost more than they gain


@dataclass(eq=False)
class Sequence:
    """One request on its way, as the scheduler sees it.

    Attributes:
        length: tokens of its prompt.
        longest: tokens that it may come to.
        is_alone: its prompt can't be read together with others': it has images.
        may_be_cut: its prompt may be read in pieces.
        is_long: it shares no pass with those that are not; see `Limits`.
        owner: what belongs to it; of no concern here.
    """

    row: int
    length: int
    longest: int
    is_alone: bool
    owner: Any
    may_be_cut: bool = False
    is_long: bool = False
    group: int | None = None


@dataclass
class RunningGroup:
    """Sequences that step together, in the order in which every stage has them.

    Attributes:
        coming: have their place, but no token yet: their prompts are read in pieces.
        on_way: of each pass on its way, oldest first: how many pieces had been handed out then.
            Pieces before the last one of a prompt concern no other row and are none of these.
        since: the turn in which its last pass came back.
    """

    number: int
    members: list[Sequence] = field(default_factory=list)
    coming: list[Sequence] = field(default_factory=list)
    on_way: list[int] = field(default_factory=list)
    since: int = 0

    @property
    def is_home(self) -> bool:
        return not self.on_way

    @property
    def cells(self) -> int:
        """Upper limit of rows times columns."""
        rows = [*self.members, *self.coming]
        return len(rows) * max((one.longest for one in rows), default=0)

    @property
    def num_rows(self) -> int:
        return len(self.members) + len(self.coming)

    @property
    def is_long(self) -> bool:
        return any(one.is_long for one in [*self.members, *self.coming])


@dataclass(frozen=True)
class Prefill:
    """Prompts that are read in one pass.

    Attributes:
        piece: places of the tokens of the only prompt; None: all prompts whole.
    """

    group: RunningGroup
    chosen: list[Sequence]
    piece: range | None = None


@dataclass(frozen=True)
class Limits:
    """Limits on the work that is done at a time.

    Attributes:
        max_rows: sequences that are answered at a time.
        prefill_tokens: tokens of prompts, with padding, that are read in one pass; a longer
            prompt has a pass of its own, and in pieces if it may be cut.
        max_cells: rows times columns of all caches together; None: no limit.
        max_length: longest prompt with its answer, in tokens.
        num_groups: groups of sequences; None: by a rule.
        short_length: see `Stage`.
    """

    max_rows: int = 64
    prefill_tokens: int = 2048
    max_cells: int | None = None
    max_length: int = 2**31
    num_groups: int | None = None
    short_length: int | None = None

    def is_long(self, length: int) -> bool:
        """Whether a row is of those that are read apart from shorter ones."""
        return self.short_length is not None and length > self.short_length


class Scheduler:
    """Keeps sequences that wait and groups that run.

    Args:
        best_groups: number of sequences -> number of groups.
        num_stages: prompts are read in at least as many passes, so that all stages work.
    """

    def __init__(
        self, limits: Limits, *, best_groups: Callable[[int], int], num_stages: int
    ) -> None:
        self.limits = limits
        self.best_groups = best_groups
        self.num_stages = num_stages
        self.waiting: deque[Sequence] = deque()
        self.groups: dict[int, RunningGroup] = {}
        self.leaving: list[tuple[int, int]] = []  # (group, row), sent with the next order
        self.reading: Sequence | None = None  # a prompt of which pieces are still to be read
        self._piece_tokens = self._num_read = 0  # size of a piece of `reading`; its tokens so far
        self._turn = itertools.count(1)
        self._most_tokens = limits.prefill_tokens  # limit of the pass that is put together
        self._num_pieces = 0  # number of pieces that were handed out
        self._was_piece = False  # whether the last pass that was handed out was a piece

    # other threads call both: copy the groups into a list at once, before they change

    @property
    def num_running(self) -> int:
        return sum(group.num_rows for group in list(self.groups.values()))

    @property
    def num_cells(self) -> int:
        return sum(group.cells for group in list(self.groups.values()))

    def running_by_row(self) -> dict[int, Sequence]:
        """Sequences of which something may be on its way."""
        groups = self.groups.values()
        return {one.row: one for group in groups for one in [*group.members, *group.coming]}

    def next_prefill(self) -> Prefill | None:
        """Takes sequences that wait, in their order, into a group, or the next piece of one.

        None: there is nothing to read, or a step comes first.
        """
        if self._was_piece and self._home():
            return None
        if self.reading is not None:
            # the next piece waits for a pass that is about to come back, in a full pipeline when as
            # many pieces as there are further stages have followed it. Started sooner, pieces would
            # queue up before every token of those that run
            enough = self._num_pieces - (self.num_stages - 1)
            waits = any(one.on_way and one.on_way[0] <= enough for one in self.groups.values())
            return None if waits else self._next_piece()
        room = self.limits.max_rows - self.num_running
        if not self.waiting or room < 1:
            return None
        # a pass for one prompt costs about as much as a step of all: few wait for each other
        enough = max(1, self.limits.max_rows // ROOM_TO_WAIT_FOR)
        if self.num_running and room < min(len(self.waiting), enough):
            return None
        group = self._emptiest(min(len(self.waiting), room))
        chosen: list[Sequence] = []
        self._most_tokens = self.limits.prefill_tokens
        if self.num_stages > 1:  # few enough that the prompts that wait keep all stages busy
            share = sum(one.length for one in self.waiting) // (2 * self.num_stages)
            self._most_tokens = min(self._most_tokens, max(LEAST_TOKENS, share))
        while self.waiting and len(chosen) < room and self._may_add(group, chosen):
            chosen.append(self.waiting.popleft())
            if chosen[0].is_alone:
                break
        return self._begin(group, chosen) if chosen else None

    def _begin(self, group: RunningGroup, chosen: list[Sequence]) -> Prefill:
        self.groups[group.number] = group
        for one in chosen:
            one.group = group.number
        # only a prompt that has a pass of its own can be too long for one
        if chosen[0].may_be_cut and chosen[0].length > self._most_tokens:
            group.coming += chosen
            count = -(-chosen[0].length // self._most_tokens)
            self.reading, self._num_read = chosen[0], 0
            self._piece_tokens = -(-chosen[0].length // count)
            return self._next_piece()
        group.members += chosen
        group.on_way.append(self._num_pieces)
        self._was_piece = False
        return Prefill(group, chosen)

    def _next_piece(self) -> Prefill:
        one = self.reading
        assert one is not None and one.group is not None  # the callers looked
        piece = range(self._num_read, min(self._num_read + self._piece_tokens, one.length))
        group = self.groups[one.group]
        self._num_pieces += 1
        self._was_piece = True
        self._num_read = piece.stop
        if piece.stop == one.length:
            self.reading = None
            group.coming.remove(one)
            group.members.append(one)
            group.on_way.append(self._num_pieces)
        return Prefill(group, [one], piece)

    def _emptiest(self, num_new: int) -> RunningGroup:
        total = self.num_running + num_new
        wanted = self.limits.num_groups or self.best_groups(total)
        is_long = self.waiting[0].is_long
        groups = [group for group in self.groups.values() if group.is_long == is_long]
        if not groups or len(self.groups) < min(wanted, total):
            free = next(number for number in itertools.count() if number not in self.groups)
            return RunningGroup(free)
        return min(groups, key=lambda group: (len(group.members), group.number))

    def _may_add(self, group: RunningGroup, chosen: list[Sequence]) -> bool:
        new = self.waiting[0]
        if chosen and (new.is_alone or new.is_long != chosen[0].is_long):
            return False
        width = max(one.length for one in [*chosen, new])
        if chosen and width * (len(chosen) + 1) > self._most_tokens:
            return False
        total = min(self.num_running + len(chosen) + len(self.waiting), self.limits.max_rows)
        fair = -(-total // (self.limits.num_groups or self.best_groups(total)))
        if chosen and group.num_rows + len(chosen) >= fair:
            return False
        if self.limits.max_cells is None:
            return True
        longest = max(one.longest for one in [*group.members, *chosen, new])
        cells = (group.num_rows + len(chosen) + 1) * longest
        return self.num_cells - group.cells + cells <= self.limits.max_cells

    def next_step(self, *, may_wait: bool = True) -> RunningGroup | None:
        """The group that has been home longest; None: there is none, or it waits for another.

        Args:
            may_wait: False where groups were joined, which is told with the step.
        """
        ready = self._home()
        if not ready:
            return None
        if may_wait and len(ready) == 1 and self._are_too_many():
            # groups return one at a time: wait if any of the others could join this one
            others = [other for other in self.groups.values() if other is not ready[0]]
            if all(self._may_join(ready[0], other) for other in others):
                return None
        group = min(ready, key=lambda one: one.since)
        group.on_way.append(self._num_pieces)
        self._was_piece = False
        return group

    def _home(self) -> list[RunningGroup]:
        return [group for group in self.groups.values() if group.is_home and group.members]

    def next_joins(self) -> list[tuple[int, int]]:
        """Return (from, into) of returned groups to merge, if there are too many groups."""
        home = sorted(self._home(), key=lambda group: len(group.members))
        if not self._are_too_many() or len(home) < 2:
            return []
        source, target = home[0], home[1]
        if not self._may_join(source, target):
            return []
        target.members += source.members
        for one in source.members:
            one.group = target.number
        del self.groups[source.number]
        return [(source.number, target.number)]

    def _are_too_many(self) -> bool:
        if self.waiting or self.reading is not None or len(self.groups) < 2:
            return False
        wanted = self.limits.num_groups or self.best_groups(self.num_running)
        return len(self.groups) > wanted

    def _may_join(self, source: RunningGroup, target: RunningGroup) -> bool:
        if source.is_long != target.is_long:
            return False
        if self.limits.max_cells is None:
            return True
        members = [*source.members, *target.members]
        cells = len(members) * max(one.longest for one in members)
        others = self.num_cells - source.cells - target.cells
        return others + cells <= self.limits.max_cells

    def came_home(self, number: int) -> None:
        """Record that a pass of a group is back."""
        group = self.groups[number]
        group.on_way.pop(0)
        group.since = next(self._turn)
        self._forget_if_over(group)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its group; the stages do so with the next order.

        Orders on their way still have it, and the stages keep all orders in turn.
        """
        assert sequence.group is not None  # it runs
        group = self.groups[sequence.group]
        if sequence in group.coming:
            group.coming.remove(sequence)
            self.reading = None
        else:
            take_out(group.members, group.members.index(sequence))
        self.leaving.append((group.number, sequence.row))
        self._forget_if_over(group)

    def withdraw(self, owner: Any) -> bool:
        """Takes out a sequence that waits or is read in pieces; False: it is neither."""
        for one in [one for one in self.waiting if one.owner is owner]:
            self.waiting.remove(one)
            return True
        if self.reading is None or self.reading.owner is not owner:
            return False
        self.leave(self.reading)
        return True

    def _forget_if_over(self, group: RunningGroup) -> None:
        if group.is_home and not group.num_rows:
            del self.groups[group.number]

    def take_leaving(self) -> list[tuple[int, int]]:
        """Return the rows that left since the last order, each of them once."""
        leaving, self.leaving = self.leaving, []
        return leaving
