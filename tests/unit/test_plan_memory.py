"""Memory of a rank and the advice, against cases computed by hand."""

from dataclasses import replace

from stageline.pipeline.plan import parse_action
from stageline.pipeline.schedules import make_schedule
from stageline.planner.estimate import Cost, MemoryRules, ModelCosts, peak_activations, rank_memory
from stageline.planner.partition import Placement, advise
from stageline.planner.planner import refusal, teacher_bytes

SECONDS = {"forward": 1.0, "backward": 2.0, "input_grad": 1.0, "weight_grad": 1.0}
SIZES = {"num_parameters": 10, "num_trainable": 10, "weights": 20, "gradients": 40, "masters": 40}
LAYER = Cost(**SECONDS, **SIZES, saved=100, transient=30, trains=True)
NOTHING = Cost()


def model(layer=LAYER, *, num_layers=4, first=NOTHING, last=NOTHING, tied=NOTHING):
    parts = {"first": first, "layers": (layer,) * num_layers, "last": last, "tied": tied}
    return ModelCosts(overhead=Cost(saved=1), **parts, border=5, batch=3, shape=(1, 1))


def test_a_rank_answers_before_it_trains_and_the_fuller_phase_counts():
    """Caches of all its layers are there at once, and one pass; activations are not there yet."""
    layer = replace(LAYER, cache=1000, answering=50)
    costs = model(layer, last=Cost(answering=70))
    schedule = make_schedule("1f1b", num_ranks=2)
    rules = MemoryRules(optimizer_bytes=8)
    memory = rank_memory(costs, [2, 2], schedule, num_micro_batches=4, rules=rules)
    assert [rank.answers for rank in memory] == [2 * 1000 + 50, 2 * 1000 + 70]
    assert [rank.peak - rank.lasting for rank in memory] == [2050, 2070]
    little = replace(costs, layers=(replace(layer, cache=1),) * 4)
    memory = rank_memory(little, [2, 2], schedule, num_micro_batches=4, rules=rules)
    assert all(rank.peak == rank.lasting + rank.training for rank in memory)


def test_a_teacher_is_on_every_rank_and_its_distributions_on_the_last():
    """10 layers of 20 bytes, evenly on the stages, first and last of 7 and 9."""
    teacher = model(num_layers=10, first=Cost(weights=7), last=Cost(weights=9))
    rules = MemoryRules(teacher=teacher_bytes(teacher, 1000))
    schedule = make_schedule("1f1b", num_ranks=2)
    found = Placement(model(), schedule, 4, rules).expect([2, 2])
    assert [rank.teacher for rank in found.memory] == [5 * 20 + 7, 5 * 20 + 9 + 1000]
    alone = rank_memory(model(), [2, 2], schedule, num_micro_batches=4, rules=MemoryRules())
    assert [one.peak - two.peak for one, two in zip(found.memory, alone, strict=True)] == [
        107,
        1109,
    ]
    assert "teacher 107 B" in refusal(found, (0, 0))
    both = make_schedule("interleaved_1f1b", num_ranks=1, stages_per_rank=2)
    [memory] = rank_memory(model(), [2, 2], both, num_micro_batches=4, rules=rules)
    assert memory.teacher == 107 + 1109
    server = MemoryRules(teacher=teacher_bytes(None, 50))
    memory = rank_memory(model(), [2, 2], schedule, num_micro_batches=4, rules=server)
    assert [rank.teacher for rank in memory] == [0, 50]


def test_a_refusal_names_what_makes_the_full_phase_smaller():
    costs = model(replace(LAYER, cache=1000))
    schedule = make_schedule("1f1b", num_ranks=2)
    rules = MemoryRules(optimizer_bytes=0)
    found = Placement(costs, schedule, 4, rules).expect([2, 2])
    lasting, trains = found.memory[0].lasting, max(rank.training for rank in found.memory)
    said = refusal(found, (lasting + trains, lasting + trains))
    assert "`group_size`" in said and "`micro_batch_size`" not in said
    said = refusal(found, (lasting + trains - 1,) * 2)
    assert "`micro_batch_size`" in said and "`group_size`" in said


def test_stage_0_of_1f1b_holds_p_micro_batches():
    rules = MemoryRules(optimizer_bytes=8)
    memory = rank_memory(
        model(), [1] * 4, make_schedule("1f1b", num_ranks=4), num_micro_batches=8, rules=rules
    )
    kept = 100 + 1 + 5  # layer, masks, and what is sent on
    assert [rank.activations for rank in memory] == [
        4 * kept + 30 - 5,  # the tensor that is sent comes after the layer's peak
        3 * kept + 30 - 5,
        2 * kept + 30 - 5,
        101 + 30,  # the last stage sends nothing on
    ]
    # bf16: weights 2, float32 gradient and master 4 each, two moments of AdamW
    assert memory[1].lasting == 20 + 40 + 40 + 80
    assert [rank.inputs for rank in memory] == [8 * 3 + 5, 10, 10, 5]
    assert memory[3].peak == memory[3].lasting + 5 + 131


def test_a_passing_need_counts_beside_what_is_held_then():
    # the head has let go of its 70 bytes when the layer before needs 90 more than it saved
    layer, head = Cost(saved=10, transient=90), Cost(saved=70, transient=5)
    both = layer + head
    assert both.saved + both.transient == max(10 + 90, 80 + 5)
    assert (layer + layer).saved + (layer + layer).transient == 20 + 90


def test_gpipe_holds_all_of_them():
    memory = rank_memory(
        model(), [2, 2], make_schedule("gpipe", num_ranks=2), num_micro_batches=6,
        rules=MemoryRules(),
    )  # fmt: skip
    assert [rank.activations for rank in memory] == [6 * 206 + 30 - 5, 6 * 201 + 30]


def test_a_large_update_counts_instead_of_activations():
    rules = MemoryRules(optimizer_bytes=0, update_bytes=1000)
    memory = rank_memory(
        model(), [2, 2], make_schedule("1f1b", num_ranks=2), num_micro_batches=2, rules=rules
    )
    assert memory[0].peak == memory[0].lasting + memory[0].inputs + 20 * 1000


def test_replicas_share_what_lasts():
    whole, half = (
        rank_memory(
            model(), [2, 2], make_schedule("1f1b", num_ranks=2), num_micro_batches=2,
            rules=MemoryRules(optimizer_bytes=8, shards=shards),
        )[0]
        for shards in (1, 2)
    )  # fmt: skip
    assert (half.optimizer, half.masters) == (whole.optimizer / 2, whole.masters / 2)
    in_use = [(one.weights, one.gradients, one.activations) for one in (half, whole)]
    assert in_use[0] == in_use[1], "a stage is whole in a step"


def test_a_tied_weight_on_one_rank_is_held_once():
    table = Cost(num_parameters=50, num_trainable=50, weights=100, gradients=200, trains=True)
    costs = model(first=table, last=table, tied=table)
    rules = MemoryRules(optimizer_bytes=8)
    apart = rank_memory(
        costs, [2, 2], make_schedule("1f1b", num_ranks=2), num_micro_batches=4, rules=rules
    )
    assert [rank.weights for rank in apart] == [140, 140]
    together = rank_memory(
        costs, [1] * 4, make_schedule("zbv", num_ranks=2), num_micro_batches=4, rules=rules
    )
    assert [rank.weights for rank in together] == [140, 40]
    assert together[0].optimizer == 8 * (50 + 20)


def test_before_the_first_trained_item_nothing_is_kept():
    frozen = Cost(forward=1.0, weights=20, num_parameters=10)
    costs = replace(model(), overhead=NOTHING, layers=(frozen, LAYER), batch=0)
    schedule = make_schedule("1f1b", num_ranks=2)
    found = Placement(costs, schedule, 4).expect([1, 1])
    assert found.memory[0].activations == 0 and found.memory[0].gradients == 0
    # rank 0: 4 forwards; rank 1 waits for the first, then 4 x (1 + 2)
    assert found.seconds == 1 + 4 * 3


def test_advice_puts_what_does_not_fit_last():
    def ask(capacities):
        return advise(
            {1: model(num_layers=8)}, num_ranks=2, num_samples=8, rules=MemoryRules(),
            capacities=capacities,
        )  # fmt: skip

    free = ask(None)
    limit = min(choice.peak for choice in free)
    tight = ask((limit, limit))
    assert tight[0].overshoot == 0 and tight[0].peak <= limit
    assert tight[-1].overshoot > 0
    assert free[0].expectation.seconds < tight[0].expectation.seconds
    assert "--schedule" in tight[0].options() and "--partition" in tight[0].options()


def test_slow_transfers_are_answered_with_more_in_flight_where_it_fits():
    def ask(hand_over, capacities=None):
        return advise(
            {1: replace(model(), hand_over=hand_over)}, num_ranks=4, num_samples=16,
            rules=MemoryRules(), capacities=capacities,
        )  # fmt: skip

    quick, slow = ask(0.0), ask(0.5)
    assert quick[0].schedule.name == "1f1b", "as fast, and with less memory"
    assert slow[0].schedule.name == "eager_1f1b", "as fast as gpipe, and with less memory"
    assert slow[0].expectation.seconds == (16 + 3) * 3 + 2 * 3 * 0.5
    kept = 100 + 1 + 5
    held = [rank.activations for rank in slow[0].expectation.memory]
    assert held == [most * kept + 25 for most in (7, 5, 3)] + [131]
    limit = quick[0].peak
    assert ask(0.5, (limit,) * 4)[0].schedule.name == "1f1b"


def test_of_two_halves_the_second_lets_go():
    """The gradients of weights need what the forward pass saved."""
    for words, peak in (("0F0 0I0 0F1 0W0 0I1 0W1", 20), ("0F0 0I0 0W0 0F1 0I1 0W1", 10)):
        order = [parse_action(word) for word in words.split()]
        assert peak_activations(order, [Cost(saved=10)]) == peak


def test_the_shorter_way_of_a_backward_pass_counts():
    cost = Cost(forward=1, backward=2, input_grad=1.5, weight_grad=1.75)
    assert (cost.seconds(), cost.seconds(splits_backward=True)) == (3, 3)
    cost = Cost(forward=1, backward=2, input_grad=1.5, weight_grad=0.25)
    assert (cost.seconds(), cost.seconds(splits_backward=True)) == (3, 2.75)
