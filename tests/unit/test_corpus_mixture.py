"""Batches of several types, against a count that draws batch after batch from plain lists."""

import itertools
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus.mixture import DROP_MODES, Apportionment, Mixture, as_drop_mode
from stageline.errors import UserError

NOTES = {"sizes": [100, 50, 10], "counts": [5, 2, 1], "batch": 8}


def _mixture(sizes, **options):
    return Mixture(sizes, **options)


def _epoch(mixture, epoch=0):
    return [mixture.batch(epoch, index) for index in range(len(mixture))]


def _per_epoch(mixture):
    """Return what an epoch takes of each type."""
    return [
        SimpleNamespace(
            drawn=drawn,
            distinct=min(size, drawn),
            repeated=max(0, drawn - size),
            dropped=max(0, size - drawn),
            most=-(-drawn // size) if size else 0,
        )
        for size, drawn in zip(mixture.sizes, mixture.drawn(), strict=True)
    ]


def _types(mixture, rows):
    return numpy.searchsorted(mixture.starts, rows, side="right") - 1


def _per_type(mixture, rows):
    return numpy.bincount(_types(mixture, rows), minlength=len(mixture.sizes)).tolist()


def _batches_by_hand(sizes, counts, mode):
    """Count the batches of an epoch by the words of the modes, one batch after another."""
    for num in itertools.count():
        left = [size - num * count for size, count in zip(sizes, counts, strict=True) if count]
        shares = [count for count in counts if count]
        whole = [rest >= share for rest, share in zip(left, shares, strict=True)]
        is_over = {
            "first_ends_drop": not all(whole),
            "first_ends_fill": any(rest <= 0 for rest in left),
            "last_ends_drop": not any(whole),
            "last_ends_fill": all(rest <= 0 for rest in left),
        }
        if is_over[mode]:
            return num


@pytest.mark.parametrize(
    ("mode", "num_batches", "drawn", "distinct", "most"),
    [
        ("first_ends_drop", 10, [50, 20, 10], [50, 20, 10], [1, 1, 1]),
        ("first_ends_fill", 10, [50, 20, 10], [50, 20, 10], [1, 1, 1]),
        ("last_ends_drop", 25, [125, 50, 25], [100, 50, 10], [2, 1, 3]),
        ("last_ends_fill", 25, [125, 50, 25], [100, 50, 10], [2, 1, 3]),
    ],
)
def test_the_example_of_the_notes(mode, num_batches, drawn, distinct, most):
    mixture = _mixture(**NOTES, drop_mode=mode)
    assert len(mixture) == num_batches
    told = _per_epoch(mixture)
    assert [share.drawn for share in told] == drawn
    assert [share.distinct for share in told] == distinct
    assert [share.most for share in told] == most
    assert [share.repeated for share in told] == [d - u for d, u in zip(drawn, distinct)]
    assert [share.dropped for share in told] == [100 - distinct[0], 50 - distinct[1], 0]
    assert [mixture.shares.share(kind) for kind in range(3)] == [5, 2, 1]


_SIZES_COUNTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=4
).filter(lambda pairs: any(count for _, count in pairs))


@settings(max_examples=50, deadline=None)
@given(_SIZES_COUNTS, st.sampled_from(DROP_MODES), st.integers(0, 3))
def test_an_epoch_is_what_the_mode_says(pairs, mode, epoch):
    sizes, counts = [list(numbers) for numbers in zip(*pairs, strict=True)]
    num_batches = _batches_by_hand(sizes, counts, mode)
    options = {"counts": counts, "batch": sum(counts), "drop_mode": mode, "seed": 7}
    if num_batches == 0:
        with pytest.raises(UserError, match="no whole batch"):
            Mixture(sizes, **options)
        return
    mixture = Mixture(sizes, **options)
    assert len(mixture) == num_batches
    batches = _epoch(mixture, epoch)
    assert all(_per_type(mixture, rows) == counts for rows in batches)
    times = numpy.bincount(numpy.concatenate(batches), minlength=sum(sizes))
    for kind, told in enumerate(_per_epoch(mixture)):
        of_type = times[mixture.starts[kind] : mixture.starts[kind + 1]]
        assert of_type.sum() == told.drawn == num_batches * counts[kind]
        assert of_type.max() - of_type.min() <= 1, "no row twice more than another"
        assert of_type.max() == told.most
        assert (of_type > 0).sum() == told.distinct
        assert (of_type == 0).sum() == told.dropped
        if mode == "first_ends_drop":
            assert of_type.max() <= 1
        if mode == "last_ends_fill" and counts[kind]:
            assert of_type.min() >= 1


@pytest.mark.parametrize("sizes", [[70, 25, 1], [7, 0, 89], [1] * 96])
def test_without_shares_types_end_together(sizes):
    """Every row once an epoch; a batch has each type's share of it, to two rows at most."""
    for mode in DROP_MODES:
        mixture = Mixture(sizes, batch=8, drop_mode=mode, seed=2)
        assert len(mixture) == 12
        batches = _epoch(mixture)
        assert sorted(numpy.concatenate(batches).tolist()) == list(range(96))
        for rows in batches:
            shares = [size / 12 for size in sizes]
            counts = _per_type(mixture, rows)
            assert all(abs(a - b) < 2 for a, b in zip(counts, shares, strict=True))


@pytest.mark.parametrize("sizes", [[103, 57, 13], [9, 1, 1]])
def test_without_shares_only_an_incomplete_batch_is_left_out(sizes):
    mixture = Mixture(sizes, batch=8)
    assert len(mixture) == sum(sizes) // 8
    rows = numpy.concatenate(_epoch(mixture))
    assert len(set(rows.tolist())) == len(rows) == len(mixture) * 8
    filled = Mixture(sizes, batch=8, drop_mode="last_ends_fill")
    assert set(numpy.concatenate(_epoch(filled)).tolist()) == set(range(sum(sizes)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12), st.integers(1, 64), st.randoms())
def test_weights_are_kept_in_every_batch_and_over_all(weights, batch, random):
    in_batch, in_all = (1, 1) if len(weights) <= 2 else (2, 3)
    shares = numpy.array(weights) / sum(weights) * batch
    mixture = Mixture([10**9] * len(weights), weights=weights, batch=batch)
    start = random.choice([0, 0, 1000, 10**6])
    before = numpy.array(mixture.shares.before(start))
    for index in range(start, start + 40):
        after = numpy.array(mixture.shares.before(index + 1))
        assert after.sum() == (index + 1) * batch
        assert (after >= before).all()
        assert (numpy.abs(after - before - shares) < in_batch + 1e-6).all()
        assert (numpy.abs(after - shares * (index + 1)) < in_all + 1e-3).all()
        before = after


def test_decimal_weights_are_exact():
    """Draw exactly 7 and 3 of 10 in every batch, although 0.7 has no exact binary form."""
    mixture = Mixture([10**6, 10**6], weights=[0.7, 0.3], batch=10, drop_mode="first_ends_drop")
    places = (0, 1, 77_777, len(mixture) - 1)
    assert all(_per_type(mixture, mixture.batch(0, index)) == [7, 3] for index in places)
    assert len(mixture) == 10**6 // 7
    shares = Apportionment.of_weights([0.7, 0.2, 0.1], 10)
    assert shares.before(10**18) == [7 * 10**18, 2 * 10**18, 10**18]


def test_weights_end_an_epoch_by_the_modes():
    mixtures = {
        mode: Mixture([100, 50, 10], weights=[0.7, 0.25, 0.05], batch=8, drop_mode=mode)
        for mode in DROP_MODES
    }
    assert all(share.most == 1 for share in _per_epoch(mixtures["first_ends_drop"]))
    ended = [share.dropped == 0 for share in _per_epoch(mixtures["first_ends_fill"])]
    assert ended == [True, False, False], "the first type is seen whole"
    assert all(share.dropped == 0 for share in _per_epoch(mixtures["last_ends_fill"]))
    assert len(mixtures["first_ends_fill"]) - len(mixtures["first_ends_drop"]) in (0, 1)
    assert len(mixtures["last_ends_fill"]) - len(mixtures["last_ends_drop"]) in (0, 1)


@pytest.mark.parametrize("num_replicas", [4])
def test_replicas_get_their_share_of_each_type(num_replicas):
    counts = [64, 40, 20, 4]
    mixture = Mixture([1000, 900, 800, 700], counts=counts, batch=128)
    rows = mixture.batch(3, 5)
    for replica in range(num_replicas):
        own = _per_type(mixture, rows[replica::num_replicas])
        for count, share in zip(own, counts, strict=True):
            assert abs(count - share / num_replicas) < 1


def test_any_batch_is_found_without_those_before():
    mixture, other = (Mixture([40, 9], weights=[3, 1], batch=5, drop_mode=3) for _ in range(2))
    in_turn = [mixture.batch(epoch, index) for epoch in range(2) for index in range(len(mixture))]
    backwards = [
        other.batch(epoch, index) for epoch in (1, 0) for index in reversed(range(len(other)))
    ]
    assert all((a == b).all() for a, b in zip(in_turn, reversed(backwards), strict=True))


def test_epochs_types_and_seeds_have_orders_of_their_own():
    def rows(seed, epoch, kind):
        mixture = Mixture([500, 500], counts=[5, 5], batch=10, seed=seed)
        drawn = numpy.concatenate(_epoch(mixture, epoch))
        return tuple((drawn[_types(mixture, drawn) == kind] - 500 * kind).tolist())

    orders = {rows(*case) for case in itertools.product((0, 1), (0, 1, 2), (0, 1))}
    assert len(orders) == 12


def test_a_repeated_type_comes_in_another_order():
    mixture = Mixture([50, 10], counts=[5, 5], batch=10, drop_mode="last_ends_fill")
    small = numpy.concatenate([rows[5:] for rows in _epoch(mixture)]).reshape(5, 10)
    assert len({tuple(turn) for turn in small.tolist()}) == 5
    assert all(sorted(turn) == list(range(50, 60)) for turn in small.tolist())


def test_without_shuffling_types_come_as_they_lie():
    mixture = Mixture([6, 4], counts=[3, 2], batch=5, shuffle=False)
    assert [rows.tolist() for rows in _epoch(mixture, 9)] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]


def test_modes_have_names_and_numbers():
    assert [as_drop_mode(number) for number in range(4)] == list(DROP_MODES)
    assert as_drop_mode("3") == as_drop_mode("last_ends_fill") == "last_ends_fill"
    with pytest.raises(UserError, match=r"drop mode '4'.*first_ends_drop.*0 to 3"):
        as_drop_mode("4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": [5, 2, 1], "batch": 16}, r"add up to 8.*16 rows"),
        ({"counts": [5, 3], "batch": 8}, r"5,3 were given for 3 types with 100,50,10 rows"),
        ({"weights": [1, -1, 1], "batch": 8}, "none negative"),
        ({"counts": [5, 2, 11], "batch": 18}, r"type 2: 10 rows, 11 in a batch"),
        ({"batch": 161}, r"no whole batch of 161 rows \(type 0: 100 rows, 100.6 in"),
    ],
)
def test_shares_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        Mixture([100, 50, 10], **options)


def test_a_type_without_rows_can_have_no_share():
    with pytest.raises(UserError, match=r"type 1 of the corpus has no rows"):
        Mixture([100, 0], counts=[7, 1], batch=8)
    with pytest.raises(UserError, match="has no rows"):
        Mixture([0, 0], batch=8)
    assert len(Mixture([100, 0], counts=[8, 0], batch=8)) == 12
