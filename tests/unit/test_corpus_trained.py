"""Rows that a run has seen, against the run's own steps; removing them leaves the rest."""

import itertools
import random

import numpy
import pytest

from stageline.corpus.mixture import Mixture
from stageline.corpus.pack import pack_corpus
from stageline.corpus.run_sampler import (
    find_trained,
    load_indices,
    rows_seen,
    run_sampler,
    save_indices,
)
from stageline.errors import DataError
from tests.helpers.tiny_corpora import documents, tiny_corpus

SIZES = [45, 20, 9]


def _seen_by_steps(mixture, *, steps, accumulate_steps, dp_degree):
    batch_size = mixture.batch_rows // dp_degree
    sampler = run_sampler(
        mixture.sizes,
        batch_size=batch_size,
        step_samples=batch_size * accumulate_steps,
        dp_degree=dp_degree,
        counts=mixture.shares.whole,
        drop_mode=mixture.drop_mode,
        seed=mixture.seed,
    )
    shares = itertools.islice(sampler.shares(), steps)
    return sorted({row for step in shares for share in step for row in share})


def test_rows_seen_are_those_of_the_steps():
    dice = random.Random(2)
    for _ in range(30):
        mixture = Mixture(
            SIZES, counts=[5, 2, 1], batch=8, drop_mode=dice.randrange(4), seed=dice.randrange(9)
        )
        run = {
            "steps": dice.randint(0, 12),
            "accumulate_steps": dice.randint(1, 3),
            "dp_degree": dice.choice([1, 2, 4]),
        }
        num_batches = run["steps"] * run["accumulate_steps"]
        assert rows_seen(mixture, num_batches).tolist() == _seen_by_steps(mixture, **run)


def test_rows_seen_since_a_batch():
    mixture = Mixture(SIZES, weights=[3, 2, 1], batch=6, drop_mode=3)
    batches = [mixture.batch(*divmod(number, len(mixture))) for number in range(7, 15)]
    expected = numpy.unique(numpy.concatenate(batches))
    assert rows_seen(mixture, 15, first_batch=7).tolist() == expected.tolist()
    assert len(rows_seen(mixture, 7, first_batch=7)) == 0


def test_rows_of_a_part_of_the_corpus():
    """The last segments of each type are held out: row 0 of type 1 is segment 45 all the same."""
    ranges = [(0, 40), (45, 60), (65, 70)]
    mixture = Mixture([40, 15, 5], counts=[5, 2, 1], batch=8, drop_mode=3)
    seen = find_trained(mixture, len(mixture), ranges=ranges)
    assert seen.tolist() == [index for first, stop in ranges for index in range(first, stop)]


def test_segments_of_packed_rows(tmp_path):
    lengths = ([(9, 9, 5), (3,), (7, 8), (16,), (4, 5, 6, 7)], [(10,), (12, 3), (6,)])
    packed = pack_corpus(tiny_corpus(tmp_path / "a", [documents(each) for each in lengths]))
    mixture = Mixture(numpy.diff(packed.type_starts), batch=2, seed=5)
    seen = find_trained(mixture, 3, packed=packed)
    rows = numpy.concatenate([mixture.batch(0, index) for index in range(3)])
    assert seen.tolist() == sorted(index for row in rows for index in packed[row])


def test_segments_are_sorted_however_rows_are_packed():
    class Packed:
        @staticmethod
        def members(rows):
            return numpy.array([7 - 2 * row for row in rows])  # row 0 has a later one than row 1

    seen = find_trained(Mixture([3], batch=3, seed=5), 1, packed=Packed)
    assert seen.tolist() == [3, 5, 7]


@pytest.mark.parametrize("name", ["a.npy", "a.txt", "remove.idx"])
def test_lists_come_back(tmp_path, name):
    numbers = numpy.array([0, 5, 10**12])
    save_indices(tmp_path / name, numbers)
    assert load_indices(tmp_path / name).tolist() == numbers.tolist()
    assert (tmp_path / name).read_bytes().startswith(b"\x93NUMPY") == name.endswith("npy")
    save_indices(tmp_path / name, numbers[:0])
    assert load_indices(tmp_path / name).dtype == numpy.int64


def test_what_is_no_list_is_refused(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(DataError, match="is missing"):
        load_indices(path)
    path.write_text("1\n\nx2\n")
    with pytest.raises(DataError, match="not a list of segments.*'x2'"):
        load_indices(path)
    numpy.save(tmp_path / "c.npy", numpy.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="not a list of segments"):
        load_indices(tmp_path / "c.npy")
