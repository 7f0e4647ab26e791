"""The scheduler against simulated stages, over drawn arrivals, ends and cancellations.

A stage is simulated as what orders say: rows that come, whole or in pieces, leave and join. Passes
come back in their order, some of them late; a sequence ends after as many tokens as were drawn for
it, or with a piece that failed.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.inference.decoding.cache import take_out
from stageline.inference.decoding.scheduler import Limits, RunningGroup, Scheduler, Sequence


@dataclass
class Simulated:
    """The engine and one stage, without a model."""

    limits: Limits
    best_groups: object
    num_stages: int
    stage: dict = field(default_factory=dict)  # group -> rows in their order
    flying: deque = field(default_factory=deque)
    left: dict = field(default_factory=dict)  # row -> tokens that are to come
    admitted: list = field(default_factory=list)
    num_steps: int = 0
    unfinished: dict = field(default_factory=dict)  # row -> tokens of its prompt that were read
    failing: set = field(default_factory=set)  # rows with pieces that come back with an error
    told: list = field(default_factory=list)  # everything that was started, in order

    def __post_init__(self):
        self.scheduler = Scheduler(
            self.limits, best_groups=self.best_groups, num_stages=self.num_stages
        )

    def submit(self, row, length, num_tokens, is_alone, *, may_be_cut=False):
        self.left[row] = num_tokens
        longest = length + num_tokens
        self.scheduler.waiting.append(
            Sequence(row, length, longest, is_alone, owner=row, may_be_cut=may_be_cut)
        )

    def cancel(self, row):
        if self.scheduler.withdraw(row):
            del self.left[row]
        elif row in self.left:
            self.left[row] = 1  # it ends when its pass is back

    def start(self):
        scheduler = self.scheduler
        found = scheduler.next_prefill()
        if found is not None:
            group, chosen = found.group, found.chosen
            if found.piece is not None:
                self.read_piece(group, chosen, found.piece)
                return True
            assert not (len(chosen) > 1 and any(one.is_alone for one in chosen))
            width = max(one.length for one in chosen)
            assert len(chosen) == 1 or width * len(chosen) <= self.limits.prefill_tokens
            assert not chosen[0].may_be_cut or width <= self.limits.prefill_tokens
            self.admitted += [one.row for one in chosen]
            self.carry_out(joins=[])
            rows = [one.row for one in chosen]
            self.stage.setdefault(group.number, []).extend(rows)
            self.fly("prefill", group.number, rows)
            return True
        joins = scheduler.next_joins()
        group = scheduler.next_step(may_wait=not joins)
        if group is None:
            assert not joins, "a join that no order would tell"
            return False
        self.carry_out(joins)
        rows = [one.row for one in group.members]
        assert self.stage[group.number] == rows, "the stage has the rows in another order"
        self.fly("step", group.number, rows)
        self.num_steps += 1
        return True

    def read_piece(self, group, chosen, piece):
        (one,) = chosen
        assert one.may_be_cut and one.length > len(piece) <= self.limits.prefill_tokens
        if self.told[-1:] == ["piece"]:
            groups = self.scheduler.groups.values()
            is_last = piece.stop == one.length
            others = [other for other in groups if not (is_last and other is group)]
            assert not any(other.is_home and other.members for other in others), "no step between"
        if piece.start == 0:
            self.admitted.append(one.row)
        self.carry_out(joins=[])
        assert self.unfinished.pop(one.row, 0) == piece.start
        if piece.stop < one.length:
            self.unfinished[one.row] = piece.stop
        else:
            self.stage.setdefault(group.number, []).append(one.row)
        kind = "piece" if piece.stop < one.length else "prefill"
        self.fly(kind, group.number, [one.row])
        self.told[-1] = "piece"

    def carry_out(self, joins):
        for number, row in self.scheduler.take_leaving():
            if self.unfinished.pop(row, None) is not None:
                continue
            rows = self.stage[number]
            take_out(rows, rows.index(row))
            if not rows:
                del self.stage[number]
        for source, target in joins:
            self.stage[target].extend(self.stage.pop(source))

    def fly(self, kind, number, rows):
        steps = [group for what, group, _ in self.flying if what == "step"]
        if kind == "step":
            others = [group for what, group, _ in self.flying if what != "piece"]
            assert number not in others, "it is on its way"
        assert len(steps) == len(set(steps))
        self.flying.append((kind, number, rows))
        self.told.append(kind)

    def land(self):
        kind, number, rows = self.flying.popleft()
        if kind == "piece":
            running = self.scheduler.running_by_row()
            if rows[0] in self.failing and rows[0] in running:
                self.scheduler.leave(running[rows[0]])
                del self.left[rows[0]]
            return
        members = {one.row: one for one in self.scheduler.groups[number].members}
        for row in rows:
            if row not in members:
                continue  # an earlier piece had failed
            self.left[row] -= 1
            if self.left[row] == 0:
                del self.left[row]
                self.scheduler.leave(members[row])
        self.scheduler.came_home(number)

    def check(self):
        scheduler, limits = self.scheduler, self.limits
        assert scheduler.num_running <= limits.max_rows
        if limits.max_cells is not None:
            assert scheduler.num_cells <= limits.max_cells
        groups = scheduler.groups.values()
        members = [one.row for group in groups for one in [*group.members, *group.coming]]
        assert scheduler.num_running == len(members)
        coming = [one for group in groups for one in group.coming]
        assert coming == ([] if scheduler.reading is None else [scheduler.reading])
        assert len(members) == len(set(members))
        assert {*members, *(one.row for one in scheduler.waiting)} == set(self.left)
        for number, group in scheduler.groups.items():
            assert group.number == number
            assert all(one.group == number for one in group.members)
            assert group.num_rows or group.on_way, "an empty group at home"
            on_way = [what for what, flying, _ in self.flying if flying == number].count
            on_way = on_way("step") + on_way("prefill")
            assert len(group.on_way) == on_way


lengths = st.integers(1, 30)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    max_rows=st.integers(1, 9),
    max_cells=st.none() | st.integers(60, 200),
    prefill_tokens=st.sampled_from([3, 11, 40, 2048]),
    num_groups=st.none() | st.integers(1, 4),
    num_stages=st.integers(1, 4),
    least=st.integers(1, 6),
)
def test_every_sequence_ends_within_the_limits(
    data, max_rows, max_cells, prefill_tokens, num_groups, num_stages, least
):
    limits = Limits(max_rows, prefill_tokens, max_cells, num_groups=num_groups)
    most_groups = data.draw(st.integers(1, 4))
    run = Simulated(limits, lambda rows: most_groups if rows >= least else 1, num_stages)
    submitted = []
    actions = data.draw(st.lists(st.sampled_from(["submit"] * 3 + ["act"] * 6 + ["cancel"]),
                                 min_size=10, max_size=50))  # fmt: skip
    for action in actions:
        if action == "submit":
            submitted.append(len(submitted))
            length, count = data.draw(lengths), data.draw(st.integers(1, 20))
            is_alone = data.draw(st.integers(0, 4)) == 0
            may_be_cut = not is_alone and data.draw(st.booleans())
            run.submit(submitted[-1], length, count, is_alone, may_be_cut=may_be_cut)
            if data.draw(st.integers(0, 5)) == 0:
                run.failing.add(submitted[-1])
        elif action == "cancel" and submitted:
            run.cancel(data.draw(st.sampled_from(submitted)))
        elif len(run.flying) < 2 * num_stages + 2 and data.draw(st.booleans()):
            run.start()
        elif run.flying:
            run.land()
        run.check()
    for _ in range(30 * (len(submitted) + 1) * 21):
        if not (len(run.flying) < 2 * num_stages + 2 and run.start()):
            if not run.flying:
                break
            run.land()
        run.check()
    assert not run.left and not run.scheduler.groups, "some never end"
    assert run.admitted == sorted(run.admitted), "first come, first read"
    run.carry_out([])
    assert not run.stage and not run.unfinished


# -- prompts in pieces -----------------------------------------------------------------------


def reading_run(num_stages, **limits):
    """Return a run with one answer, and a prompt of 30 tokens that is read in six pieces."""
    run = Simulated(Limits(**{"max_rows": 4, "prefill_tokens": 5, **limits}), lambda rows: 1,
                    num_stages)  # fmt: skip
    run.submit(0, 5, 20, False)
    assert run.start()
    run.land()
    run.submit(1, 30, 4, False, may_be_cut=True)
    return run


@pytest.mark.parametrize(
    ("num_stages", "expected"),
    [
        (1, ["piece", "step"] * 6),
        (2, ["piece", "step"] * 6),
        (4, ["piece", "step", "piece", "piece", "piece", "step", "piece", "piece"]),
    ],
)
def test_steps_are_taken_between_pieces(num_stages, expected):
    """A step is waited for when it has had its time to come back, and no piece runs ahead of it."""
    run = reading_run(num_stages)
    run.told.clear()
    while run.scheduler.reading is not None or run.scheduler.waiting:
        if not (len(run.flying) < 2 * num_stages + 2 and run.start()):
            run.land()
        run.check()
    assert run.told[: len(expected)] == expected[: len(run.told)]
    assert run.told.count("piece") == 6


def test_a_prompt_in_pieces_has_its_row_and_its_cells_from_the_start():
    run = reading_run(2, max_rows=2, max_cells=84)
    run.submit(2, 4, 4, False)
    assert run.start() and run.scheduler.reading is not None
    assert run.scheduler.num_running == 2
    assert run.scheduler.num_cells == 2 * 34
    while run.scheduler.reading is not None:
        assert run.admitted == [0, 1], "there is no row for another"
        if not run.start():
            run.land()
    assert run.scheduler.num_cells == 2 * 34


def test_only_what_is_too_long_is_cut_and_into_even_pieces():
    run = Simulated(Limits(8, prefill_tokens=10), lambda rows: 1, 1)
    for row, length in enumerate((10, 11, 21, 5)):
        run.submit(row, length, 2, False, may_be_cut=row != 2)
    found = []
    while (prefill := run.scheduler.next_prefill()) is not None:
        rows = [one.row for one in prefill.chosen]
        found.append((rows, prefill.piece and (prefill.piece.start, prefill.piece.stop)))
        for group in list(run.scheduler.groups.values()):
            while group.on_way:
                run.scheduler.came_home(group.number)
        run.scheduler.next_step()
        for group in list(run.scheduler.groups.values()):
            while group.on_way:
                run.scheduler.came_home(group.number)
    assert found == [([0], None), ([1], (0, 6)), ([1], (6, 11)), ([2], None), ([3], None)]


def running(limits, since):
    """Groups at home with a sequence of ten cells each; one group would be best."""
    scheduler = Scheduler(limits, best_groups=lambda rows: 1, num_stages=2)
    for number, turn in enumerate(since):
        members = [Sequence(number, 4, 10, False, None, group=number)]
        scheduler.groups[number] = RunningGroup(number, members, since=turn)
    return scheduler


def test_the_group_that_waits_longest_steps_first():
    scheduler = running(Limits(), (5, 3, 4))
    assert [scheduler.next_step(may_wait=False).number for _ in range(3)] == [1, 2, 0]
    assert scheduler.next_step(may_wait=False) is None


@pytest.mark.parametrize(("max_cells", "is_joined"), [(None, True), (30, True), (29, False)])
def test_groups_join_where_all_groups_together_have_the_cells(max_cells, is_joined):
    scheduler = running(Limits(max_cells=max_cells), (1, 2, 3))
    assert scheduler.next_joins() == ([(0, 1)] if is_joined else [])
    assert len(scheduler.groups) == 3 - is_joined
