"""Every schedule: complete, without circles, and as idle as published and documented."""

import re
from collections import Counter
from pathlib import Path

import pytest

from stageline.errors import UserError
from stageline.pipeline.plan import Action, Kind, parse_action
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.planner.estimate import Cost, most_in_flight, peak_activations
from stageline.planner.simulate import simulate

DOCS = Path(__file__).resolve().parents[2] / "docs"
CASES = [(p, m) for p in (1, 2, 3, 8) for m in (1, 2, 8, 16)]
# (ranks, micro-batches) -> % idle / activations alive, of a rank's layers x micro-batch, at equal
# times of forward, input and weight gradient; simulated by others from torch 2.13's own lists
SIMULATED = {
    (2, 4): "20.0/4 20.0/2 11.1/4 11.1/2.5 5.9/2.25 4.0/2 4.0/2 4.0/2.5",
    (2, 8): "11.1/8 11.1/2 5.9/8 5.9/2.5 3.0/2.25 2.0/2 2.0/2 2.0/2.5",
    (4, 8): "27.3/8 27.3/4 15.8/8 15.8/5.5 8.6/4.75 5.9/4 5.9/4 5.9/4.5",
    (4, 16): "15.8/16 15.8/4 8.6/16 8.6/5.5 4.5/4.75 3.0/4 3.0/4 3.0/4.5",
    (8, 16): "30.4/16 30.4/8 17.9/16 17.9/11.5 9.9/9.75 6.8/8 6.8/8 6.8/8.5",
}
COLUMNS = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("looped_bfs", 2),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)


def equal_times(num_stages, *, seconds=1.0, weight=1.0):
    kinds = {Kind.FORWARD: seconds, Kind.INPUT_GRAD: seconds, Kind.WEIGHT_GRAD: seconds * weight}
    return {(stage, kind): time for stage in range(num_stages) for kind, time in kinds.items()}


def stages_per_rank(name):
    kind = SCHEDULES[name]
    return (2,) if kind.is_v else (2, 3) if kind.is_multi else (1,)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_is_there_once_and_nothing_waits_in_a_circle(name):
    for num_ranks in (1, 2, 3, 4):
        for per_rank in stages_per_rank(name):
            schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=per_rank)
            for wanted in (1, 2, 3, 5, 8):
                count = schedule.legal_micro_batches(wanted)
                orders = schedule.orders(count)
                for rank, order in enumerate(orders):
                    assert {a.stage for a in order} == set(schedule.stages_of(rank))
                done = Counter(action for order in orders for action in order)
                assert set(done.values()) == {1}
                for stage in range(schedule.num_stages):
                    for index in range(count):
                        found = "".join(k.value for k in Kind if done[Action(stage, k, index)])
                        assert found in ("FB", "FIW")
                simulate(orders, equal_times(schedule.num_stages), num_stages=schedule.num_stages)


@pytest.mark.parametrize("num_ranks, count", SIMULATED)
def test_idle_share_and_memory_are_the_published_ones(num_ranks, count):
    for (name, per_rank), wanted in zip(COLUMNS, SIMULATED[num_ranks, count].split(), strict=True):
        schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=per_rank)
        times = equal_times(schedule.num_stages, seconds=1 / per_rank)
        orders = schedule.orders(count)
        result = simulate(orders, times, num_stages=schedule.num_stages)
        one_each = [Cost(saved=1)] * schedule.num_stages
        alive = max(peak_activations(order, one_each) for order in orders) / per_rank
        assert f"{100 * result.bubble:.1f}/{alive:g}" == wanted, name


def ideal_bubble(*, num_stages, num_micro_batches):
    """Return the idle share of GPipe and 1F1B at equal stages."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_idle_share_and_memory_are_as_documented(name):
    for num_ranks, count in CASES:
        if name == "1f1b" and count < num_ranks:
            continue  # not allowed
        schedule = make_schedule(name, num_ranks=num_ranks)
        result = simulate(schedule.orders(count), equal_times(num_ranks), num_stages=num_ranks)
        ideal = ideal_bubble(num_stages=num_ranks, num_micro_batches=count)
        assert result.seconds == pytest.approx(3.0 * (count + num_ranks - 1))
        assert result.bubble == pytest.approx(ideal)
        kept = {
            "gpipe": [count] * num_ranks,
            "1f1b": [num_ranks - stage for stage in range(num_ranks)],
            "eager_1f1b": [2 * (num_ranks - stage) - 1 for stage in range(num_ranks)],
        }[name]
        assert most_in_flight(schedule, count) == [min(count, most) for most in kept]


@pytest.mark.parametrize("times", [[3, 1, 1, 1], [1, 2], [1, 1, 1, 4]])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_the_slowest_stage_sets_the_pace(name, times):
    count = 16
    durations = {
        (stage, kind): float(time)
        for stage, time in enumerate(times)
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    }
    schedule = make_schedule(name, num_ranks=len(times))
    seconds = simulate(schedule.orders(count), durations, num_stages=len(times)).seconds
    whole = [3 * time for time in times]
    documented = (count - 1) * max(whole) + sum(whole)
    if name == "gpipe":
        assert seconds == pytest.approx(documented)
    else:
        assert count * max(whole) <= seconds <= documented


def test_hand_overs_cost_where_a_border_lies_between_ranks():
    schedule = make_schedule("gpipe", num_ranks=3)
    orders, times = schedule.orders(3), equal_times(3)
    alone = simulate(orders, times, num_stages=3)
    slow = simulate(orders, times, num_stages=3, hand_over=0.5)
    # twice there and twice back while the pipeline fills and empties
    assert slow.seconds == pytest.approx(alone.seconds + 4 * 0.5)
    one_rank = make_schedule("zbv", num_ranks=1)
    orders, times = one_rank.orders(2), equal_times(2)
    near = simulate(orders, times, num_stages=2, hand_over=9.0)
    assert near.seconds == simulate(orders, times, num_stages=2).seconds


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_one_more_in_flight_hides_transfers_behind_passes(num_ranks):
    """All but those that fill and empty the pipeline, while two take no longer than the passes of
    a micro-batch; 1F1B waits for them in every round."""
    times, count = equal_times(num_ranks), 4 * num_ranks

    def seconds(name, hand_over):
        orders = make_schedule(name, num_ranks=num_ranks).orders(count)
        return simulate(orders, times, num_stages=num_ranks, hand_over=hand_over).seconds

    alone = seconds("1f1b", 0.0)
    assert seconds("eager_1f1b", 0.0) == pytest.approx(alone)
    for hand_over in (0.1, 0.5, 1.5):
        ends = 2 * (num_ranks - 1) * hand_over
        assert seconds("eager_1f1b", hand_over) == pytest.approx(alone + ends)
        assert seconds("1f1b", hand_over) > alone + ends + count // 2 * hand_over / 2
    assert seconds("eager_1f1b", 3.0) > alone + 2 * (num_ranks - 1) * 3.0 + 1


def test_zero_bubble_gains_lora_little():
    """Gain little where weight gradients cost next to nothing: nothing is left to fill the gaps."""

    def idle(name, weight):
        schedule = make_schedule(name, num_ranks=4, stages_per_rank=2)
        times = equal_times(8, weight=weight)
        return simulate(schedule.orders(8), times, num_stages=8).bubble

    assert idle("interleaved_1f1b", 1.0) - idle("zbv", 1.0) > 0.09
    assert abs(idle("interleaved_1f1b", 0.02) - idle("zbv", 0.02)) < 0.005


def test_the_table_of_the_guide():
    text = (DOCS / "schedules.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d. %|]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    for num_stages, cells in rows:
        shown = [float(cell) for cell in re.findall(r"([\d.]+) %", cells)]
        wanted = [
            100 * ideal_bubble(num_stages=int(num_stages), num_micro_batches=count)
            for count in (4, 8, 16, 32, 64)
        ]
        assert shown == pytest.approx(wanted, abs=0.051)


def test_the_guide_names_every_schedule():
    text = (DOCS / "schedules.md").read_text()
    assert all(f"`{key}`" in text for key in SCHEDULES)


@pytest.mark.parametrize(
    "name, num_ranks, per_rank, count, legal, reason",
    [
        ("1f1b", 4, 1, 3, 4, "one for each of its 4 ranks"),
        ("dualpipev", 2, 2, 3, 4, "one for each of its 4 stages"),
        ("interleaved_1f1b", 2, 2, 5, 6, "2 equal rounds over 2 ranks"),
        ("interleaved_zero_bubble", 4, 3, 9, 10, "2 equal rounds over 4 ranks"),
    ],
)
def test_micro_batches_that_cannot_be_run(name, num_ranks, per_rank, count, legal, reason):
    schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=per_rank)
    with pytest.raises(UserError, match=reason) as caught:
        schedule.check(count)
    assert f"{count} micro-batches" in str(caught.value)
    assert f"can't fill --schedule {name}" in str(caught.value)
    assert f"Set --batch-size to {legal}, which makes {legal}" in str(caught.value)
    schedule.check(legal)


@pytest.mark.parametrize(
    "micro_batch_size, accumulate_steps, batch_size", [(4, 1, 12), (4, 2, 8), (1, 3, 1)]
)
def test_the_advice_is_a_batch_size_that_runs(micro_batch_size, accumulate_steps, batch_size):
    schedule = make_schedule("1f1b", num_ranks=3)
    with pytest.raises(UserError, match=f"Set --batch-size to {batch_size},"):
        schedule.check(2, micro_batch_size=micro_batch_size, accumulate_steps=accumulate_steps)
    schedule.check(batch_size * accumulate_steps // micro_batch_size)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_next_legal_number_is_the_least(name):
    for num_ranks in (1, 2, 3, 4, 8):
        schedule = make_schedule(name, num_ranks=num_ranks)
        for count in range(1, 20):
            legal = schedule.legal_micro_batches(count)
            schedule.orders(legal)
            for less in range(count, legal):
                with pytest.raises(UserError):
                    schedule.check(less)


def test_an_unknown_name():
    with pytest.raises(UserError, match="is unknown.*interleaved_zero_bubble"):
        make_schedule("1F1B", num_ranks=2)


@pytest.mark.parametrize(
    "name, per_rank, expected",
    [("1f1b", 2, "exactly 1"), ("zbv", 3, "exactly 2"), ("looped_bfs", 1, "2 or more")],
)
def test_stages_per_rank_that_a_schedule_cannot_have(name, per_rank, expected):
    with pytest.raises(UserError, match=expected):
        make_schedule(name, num_ranks=2, stages_per_rank=per_rank)


def test_the_last_stage_of_a_v_is_on_rank_0():
    assert make_schedule("zbv", num_ranks=4).last_stage_rank == 0
    assert make_schedule("zbv", num_ranks=4).stages_of(1) == [1, 6]
    assert make_schedule("interleaved_1f1b", num_ranks=4).last_stage_rank == 3
    assert make_schedule("interleaved_1f1b", num_ranks=4).stages_of(1) == [1, 5]


def test_spelling_of_actions():
    assert parse_action(" 12I3 ") == Action(12, Kind.INPUT_GRAD, 3)
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert parse_action("2SEND_F0") is None
