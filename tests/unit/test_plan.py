"""Plans: no transfer waits in a circle, no action is useless, no rank runs too far ahead."""

import pytest

from stageline.pipeline.plan import (
    Action,
    Kind,
    Transfer,
    add_transfers,
    drop_dead_backward,
    forward_orders,
    grad_flow,
    needs,
    parse_action,
)
from stageline.pipeline.runner import MOST_UNSENT
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from stageline.pipeline.topology import resolve_topology

FROZEN = {"all": 0, "first": 1, "half": 2, "but the last": 3}


def plans_of(name, num_ranks, count, first_trained=0):
    schedule = make_schedule(name, num_ranks=num_ranks)
    flow = grad_flow([stage >= first_trained for stage in range(schedule.num_stages)])
    orders = drop_dead_backward(schedule.orders(schedule.legal_micro_batches(count)), flow)
    return schedule, add_transfers(orders, schedule.rank_of_stage, flow)


def key_of(transfer):
    return transfer.is_grad, transfer.stage, transfer.micro_batch


def channels_of(plans):
    """(from, to) -> its sends and its receives, each with the passes before it on its rank."""
    found = {}
    for rank, plan in enumerate(plans):
        num_passes = 0
        for item in plan:
            if isinstance(item, Action):
                num_passes += 1
                continue
            pair = (rank, item.peer) if item.is_send else (item.peer, rank)
            both = found.setdefault(pair, ([], []))
            both[not item.is_send].append((key_of(item), num_passes))
    return found


def carry_out(plans, *, most_unsent=None):
    """Plays plans as NCCL does with a stream for each direction of a pair: the next transfer of a
    channel begins when both sides have done the passes before it, a pass when what it needs came.

    Args:
        most_unsent: a rank starts no pass while more of its sends than these are under way.
    """
    channels = channels_of(plans)
    passes = [[item for item in plan if isinstance(item, Action)] for plan in plans]
    expected = [
        {key for (_, to), (_, r) in channels.items() if to == me for key, _ in r}
        for me in range(len(plans))
    ]
    places, moved = [0] * len(plans), dict.fromkeys(channels, 0)
    arrived = [set() for _ in plans]
    while any(place < len(own) for place, own in zip(places, passes, strict=True)):
        before = list(places), dict(moved)
        for rank, own in enumerate(passes):
            if places[rank] == len(own):
                continue
            stage, kind, index = own[places[rank]]
            key = (kind != Kind.FORWARD, stage, index)
            is_waiting = key in expected[rank] and kind != Kind.WEIGHT_GRAD
            sends = [sent for (me, _), (sent, _) in channels.items() if me == rank]
            given = sum(passed <= places[rank] for sent in sends for _, passed in sent)
            gone = sum(count for (me, _), count in moved.items() if me == rank)
            is_held = most_unsent is not None and given - gone > most_unsent
            if not is_held and (not is_waiting or key in arrived[rank]):
                places[rank] += 1
        for (here, there), (sent, received) in channels.items():
            place = moved[here, there]
            if place < len(sent) and sent[place][1] <= places[here]:
                if received[place][1] <= places[there]:
                    arrived[there].add(received[place][0])
                    moved[here, there] += 1
        assert (places, moved) != before, [o[p] for p, o in zip(places, passes) if p < len(o)]
    assert all(moved[pair] == len(sent) for pair, (sent, _) in channels.items())
    return set().union(*arrived)


def forebears_of(plans, num_stages):
    """Pass -> all that must be done before it, as bits; and the bit of each pass."""
    passes = [[item for item in plan if isinstance(item, Action)] for plan in plans]
    bits = {action: 1 << i for i, action in enumerate(a for own in passes for a in own)}
    found, places = {}, [0] * len(passes)
    while len(found) < len(bits):
        for rank, own in enumerate(passes):
            while places[rank] < len(own):
                action = own[places[rank]]
                ways = [[w for w in ways if w in bits] for ways in needs(action, num_stages)]
                if not all(not w or w[0] in found for w in ways):
                    break
                direct = [w[0] for w in ways if w] + own[: places[rank]][-1:]
                found[action] = 0
                for one in direct:
                    found[action] |= found[one] | bits[one]
                places[rank] += 1
    return found, bits


def check_receives(plans, num_stages):
    """Check that no receive waits for the pass that its rank runs meanwhile.

    So a device that starts kernels in the order in which they were queued does not stop.
    """
    forebears, bits = forebears_of(plans, num_stages)
    for plan in plans:
        behind = None  # the next pass of the rank
        for item in reversed(plan):
            if isinstance(item, Action):
                behind = item
            elif not item.is_send:
                stage, index = item.stage + (1 if item.is_grad else -1), item.micro_batch
                made = [
                    Action(stage, kind, index)
                    for kind in Kind
                    if (kind == Kind.FORWARD) != item.is_grad and kind != Kind.WEIGHT_GRAD
                ]
                (maker,) = [action for action in made if action in bits]
                assert not forebears[maker] & bits[behind]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_wait_for_nothing_in_a_circle(name, num_ranks):
    for first_trained in FROZEN.values():
        schedule, plans = plans_of(name, num_ranks, 8, first_trained)
        count, num_stages = schedule.legal_micro_batches(8), schedule.num_stages
        for sent, received in channels_of(plans).values():
            assert [key for key, _ in sent] == [key for key, _ in received]
        borders = [
            stage
            for stage in range(1, num_stages)
            if schedule.rank_of_stage[stage] != schedule.rank_of_stage[stage - 1]
        ]
        wanted = {(False, stage, index) for stage in borders for index in range(count)}
        wanted |= {
            (True, stage - 1, index)
            for stage in borders
            for index in range(count)
            if stage > first_trained
        }
        assert carry_out(plans) == carry_out(plans, most_unsent=MOST_UNSENT) == wanted
        check_receives(plans, num_stages)


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
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_forward_only_needs_as_many_rounds_as_there_must_be(name, num_ranks):
    schedule = make_schedule(name, num_ranks=num_ranks)
    orders = forward_orders(schedule.rank_of_stage, 7)
    done = [action for order in orders for action in order]
    assert len(done) == len(set(done)) == 7 * schedule.num_stages
    plans = add_transfers(orders, schedule.rank_of_stage)
    carry_out(plans, most_unsent=MOST_UNSENT)


@pytest.mark.parametrize(
    "asked, shape",
    [
        (dict(schedule="1f1b", world_size=2), (2, 2, 1)),
        (dict(schedule="zbv", world_size=2), (4, 2, 1)),
        (dict(schedule="interleaved_1f1b", num_stages=12, stages_per_rank=3), (12, 4, 1)),
        (dict(schedule="1f1b", num_stages=2, world_size=4), (2, 2, 2)),
        (dict(schedule="1f1b", dp_degree=2, world_size=4), (2, 2, 2)),
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
        (dict(schedule="zbv", num_stages=3), "Set --num-stages to 2 or 4"),
        (dict(schedule="1f1b", num_stages=2, world_size=3), "3 processes were started, the run"),
        (dict(schedule="1f1b", num_stages=4, stages_per_rank=2), "exactly 1"),
    ],
)
def test_numbers_that_do_not_fit(asked, reason):
    with pytest.raises(Exception, match=reason) as caught:
        resolve_topology(**asked)
    assert caught.value.exit_code == 2
