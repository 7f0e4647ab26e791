"""Packed rows, against best-fit decreasing one length at a time."""

import pickle

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus import pack as pack_module
from stageline.corpus.header import BEGINS, ENDS, Segments, path_of
from stageline.corpus.pack import PackedRows, best_fit, pack_corpus, rows_of_best_fit
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError
from tests.helpers.corpora import RULES, tokenizer

LIMIT = RULES.seq_length


def _one_by_one(lengths, capacity):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def _rows(lengths, capacity):
    ends, members = best_fit(numpy.array(lengths, dtype=numpy.int64), capacity)
    return [part.tolist() for part in numpy.split(members, ends[:-1])]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity), st.lists(st.integers(1, capacity), min_size=1, max_size=80)
        )
    )
)
def test_rows_are_those_of_best_fit_decreasing(case):
    capacity, lengths = case
    rows = _rows(lengths, capacity)
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    rooms = [capacity - sum(lengths[index] for index in row) for row in rows]
    assert sorted(rooms) == _one_by_one(lengths, capacity)
    assert len(rows) == rows_of_best_fit(numpy.bincount(lengths, minlength=capacity + 1))
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def _write(prefix, lengths_by_type, *, seed=0):
    """Write a corpus of segments of these lengths; each is a document."""
    dice = numpy.random.default_rng(seed)
    names = [f"type {kind}" for kind in range(len(lengths_by_type))]
    writer = CorpusWriter(
        prefix, tokenizer=tokenizer(), rules=RULES, language="en", type_names=names, overwrite=True
    )
    for kind, lengths in enumerate(lengths_by_type):
        if len(lengths):
            tokens = dice.integers(5, 100, sum(lengths), dtype=numpy.uint32)
            flags = numpy.full(len(lengths), BEGINS | ENDS, numpy.uint8)
            writer.add(Segments(tokens, numpy.array(lengths), flags), type_index=kind)
    writer.close()
    return prefix


@pytest.fixture
def prefix(tmp_path):
    dice = numpy.random.default_rng(1)
    return _write(tmp_path / "a", [dice.integers(1, LIMIT + 1, 70).tolist(), [], [3, 4, 1]])


@pytest.mark.parametrize("window", [1 << 20, 1])
def test_each_segment_is_in_one_row_of_its_type(prefix, window, monkeypatch):
    monkeypatch.setattr(pack_module, "WINDOW", window)
    packed = pack_corpus(prefix)
    rows = [packed[row].tolist() for row in range(len(packed))]
    assert packed.row_length == LIMIT and packed[-1].dtype == numpy.int64
    assert sorted(sum(rows, [])) == list(range(73))
    first, empty, last, end = packed.type_starts.tolist()
    assert (first, empty, end) == (0, last, len(packed))
    assert all(max(row) < 70 for row in rows[:last]) and min(sum(rows[last:], [])) == 70
    lengths = pack_module.open_corpus(prefix).lengths()
    assert max(lengths[row].sum() for row in rows) <= LIMIT
    assert packed.padding == pytest.approx(1 - lengths.sum() / (len(rows) * LIMIT))
    assert packed.members(numpy.array([2, 0, 2])).tolist() == rows[2] + rows[0] + rows[2]
    packed.verify()
    if window == 1:
        assert rows == [[index] for index in range(73)]
    assert [path.suffix for path in sorted(prefix.parent.iterdir())] == [
        *(".bin", ".dis", ".idx", ".pack", ".tmp")
    ]


def test_packing_again_gives_the_same_bytes(prefix):
    first = pack_corpus(prefix)
    written = path_of(prefix, ".pack").stat().st_mtime_ns
    content = path_of(prefix, ".pack").read_bytes()
    assert pack_corpus(prefix).digest == first.digest
    assert path_of(prefix, ".pack").stat().st_mtime_ns == written, "they are there already"
    pack_corpus(prefix, overwrite=True)
    assert path_of(prefix, ".pack").read_bytes() == content


def test_rows_travel_to_workers(prefix):
    packed = pack_corpus(prefix)
    there = pickle.loads(pickle.dumps(packed))
    assert there[3].tolist() == packed[3].tolist() and there.digest == packed.digest


def test_rows_shorter_than_a_segment_are_refused(prefix):
    with pytest.raises(UserError, match=rf"has {LIMIT} tokens, more than a row of {LIMIT - 1}"):
        pack_corpus(prefix, LIMIT - 1)
    assert not list(prefix.parent.glob("*.pack*")), "nothing half made is left"


def test_rows_of_a_corpus_written_anew_are_refused(prefix):
    pack_corpus(prefix)
    _write(prefix, [[4, 4], [], [3]], seed=9)
    with pytest.raises(DataError, match=r"made of other segments .*corpus\.py pack"):
        PackedRows(prefix)
    assert len(pack_corpus(prefix)) == 2, "packed anew"


def _changed(path, place, value=None):
    data = bytearray(path.read_bytes())
    if value is None:
        del data[place:]
    else:
        data[place] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (-8, None, "its header announces"),
        (0, 0, "of another program"),
        (30, 0, "checksum does not fit the header"),
        (8, 9, "format version 9"),
        (-1, 255, "a row holds a segment beyond"),
        (4096 + 7, 1, "rows do not go from"),
        (4104 + 6, 1, "rows do"),
    ],
)
def test_damage_is_named(prefix, place, value, message):
    pack_corpus(prefix)
    _changed(path_of(prefix, ".pack"), place, value)
    with pytest.raises(DataError, match=message):
        PackedRows(prefix)


def test_one_segment_or_byte_more_than_there_are_is_noticed(prefix):
    count = sum(pack_corpus(prefix).header.num_segments)
    path = path_of(prefix, ".pack")
    before = path.read_bytes()
    path.write_bytes(before[:-8] + count.to_bytes(8, "little"))
    with pytest.raises(DataError, match=f"a row holds a segment beyond {count}"):
        PackedRows(prefix)
    path.write_bytes(before + b"\0")
    with pytest.raises(DataError, match="its header announces"):
        PackedRows(prefix)


def test_damage_in_the_middle_is_found_by_reading_all(prefix):
    pack_corpus(prefix)
    _changed(path_of(prefix, ".pack"), -8, 1)
    with pytest.raises(DataError, match="checksum"):
        PackedRows(prefix).verify()


def test_missing_rows_say_how_to_make_them(prefix):
    with pytest.raises(DataError, match=r"a\.pack is missing.*corpus\.py pack"):
        PackedRows(prefix)
    assert len(pack_corpus(prefix)) > 0
    with pytest.raises(IndexError):
        PackedRows(prefix)[73]
