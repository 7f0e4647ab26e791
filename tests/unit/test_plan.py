"""Plans: transfers come in one order on both sides; nothing dead is done; no rank runs away."""

import pytest

from stageline.pipeline.plan import (
    Action,
    Kind,
    Transfer,
    add_transfers,
    drop_dead_backward,
    forward_orders,
    grad_flow,
    parse_action,
)
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.pipeline.topology import resolve_topology

FROZEN = {"all": 0, "first": 1, "half": 2, "but the last": 3}


def plans_of(name, num_ranks, count, first_trained=0):
    schedule = make_schedule(name, num_ranks=num_ranks)
    flow = grad_flow([stage >= first_trained for stage in range(schedule.num_stages)])
    orders = drop_dead_backward(schedule.orders(schedule.legal_micro_batches(count)), flow)
    return schedule, add_transfers(orders, schedule.rank_of_stage, flow)


def carry_out_blocking(plans):
    """Plays plans with sends that block until they are received: the worst a backend can do."""
    places = [0] * len(plans)
    arrived = set()
    while any(place < len(plan) for place, plan in zip(places, plans, strict=True)):
        before = list(places)
        for rank, plan in enumerate(plans):
            if places[rank] == len(plan):
                continue
            item = plan[places[rank]]
            if isinstance(item, Action):
                places[rank] += 1
            elif item.is_send:
                theirs = plans[item.peer][places[item.peer]]
                if theirs == item._replace(is_send=False, peer=rank):
                    arrived.add((item.is_grad, item.stage, item.micro_batch))
                    places[rank] += 1
                    places[item.peer] += 1
        assert places != before, [plan[p] for p, plan in zip(places, plans, strict=True)]
    return arrived


@pytest.mark.parametrize("first_trained", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_even_blocking_transfers_cannot_lock(name, num_ranks, first_trained):
    schedule, plans = plans_of(name, num_ranks, 8, first_trained)
    arrived = carry_out_blocking(plans)
    count = schedule.legal_micro_batches(8)
    borders = [
        stage
        for stage in range(1, schedule.num_stages)
        if schedule.rank_of_stage[stage] != schedule.rank_of_stage[stage - 1]
    ]
    wanted = {(False, stage, index) for stage in borders for index in range(count)}
    wanted |= {
        (True, stage - 1, index)
        for stage in borders
        for index in range(count)
        if stage > first_trained
    }
    assert arrived == wanted


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_computed_before_the_first_trained_stage(name):
    _, plans = plans_of(name, 4, 8, first_trained=2)
    done = [item for plan in plans for item in plan if isinstance(item, Action)]
    assert {a.kind for a in done if a.stage < 2} == {Kind.FORWARD}
    assert {a.kind for a in done if a.stage == 2} == {Kind.FORWARD, Kind.BACKWARD}
    assert not any(
        item.is_grad and item.stage < 2
        for plan in plans
        for item in plan
        if isinstance(item, Transfer)
    )


def test_a_pass_that_is_not_parted_stands_where_its_weights_come():
    words = "1F0 1F1 1I0 1I1 1W0 1W1"
    order = [parse_action(word) for word in words.split()]
    for trains, wanted in (
        ((True, True), words),
        ((False, True), "1F0 1F1 1B0 1B1"),
        ((False, False), "1F0 1F1"),
    ):
        (kept,) = drop_dead_backward([order], grad_flow(trains))
        assert " ".join(map(str, kept)) == wanted
    parted = [parse_action(word) for word in "1F0 1I0 1F1 1W0".split()]
    (kept,) = drop_dead_backward([parted], grad_flow((False, True)))
    assert " ".join(map(str, kept)) == "1F0 1F1 1B0"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_forward_only_needs_as_many_rounds_as_there_must_be(name, num_ranks):
    schedule = make_schedule(name, num_ranks=num_ranks)
    orders = forward_orders(schedule.rank_of_stage, 7)
    done = [action for order in orders for action in order]
    assert len(done) == len(set(done)) == 7 * schedule.num_stages
    carry_out_blocking(add_transfers(orders, schedule.rank_of_stage))


@pytest.mark.parametrize(
    "asked, shape",
    [
        (dict(schedule="1f1b", num_stages=4), (4, 4, 1)),
        (dict(schedule="1f1b", world_size=2), (2, 2, 1)),
        (dict(schedule="zbv", world_size=2), (4, 2, 1)),
        (dict(schedule="interleaved_1f1b", num_stages=12, stages_per_rank=3), (12, 4, 1)),
        (dict(schedule="1f1b", num_stages=2, world_size=4), (2, 2, 2)),
        (dict(schedule="1f1b", dp_degree=2, world_size=4), (2, 2, 2)),
        (dict(schedule="gpipe", num_stages=2, dp_degree=3), (2, 2, 3)),
        (dict(schedule="1f1b"), (1, 1, 1)),
    ],
)
def test_what_was_left_open_follows(asked, shape):
    topology = resolve_topology(**asked)
    assert (topology.num_stages, topology.num_ranks, topology.dp_degree) == shape
    assert topology.num_processes == shape[1] * shape[2]


@pytest.mark.parametrize(
    "asked, reason",
    [
        (dict(schedule="zbv", num_stages=3), "set --num-stages to 2 or 4"),
        (dict(schedule="1f1b", num_stages=2, world_size=3), "3 processes were started, the run"),
        (dict(schedule="1f1b", num_stages=2, dp_degree=2, world_size=2), "the run has 4"),
        (dict(schedule="1f1b", num_stages=4, stages_per_rank=2), "exactly 1"),
    ],
)
def test_numbers_that_do_not_fit(asked, reason):
    with pytest.raises(Exception, match=reason) as caught:
        resolve_topology(**asked)
    assert caught.value.exit_code == 2
