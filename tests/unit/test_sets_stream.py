"""Streams: positions that mean the same row to every process, without the files in memory."""

import itertools
import multiprocessing

import pytest
import torch

from commands.train import SHELF, pipeline
from register import import_shelf
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.rows import sets as streams
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.data.rows.sets import read_sets
from stageline.errors import DataError, UserError
from tests.helpers.tiny_sets import asked, write_chat

import_shelf(*SHELF)
assert pipeline  # importing it registered the engine


@pytest.fixture
def folder(tmp_path):
    write_chat(tmp_path / "a/0.jsonl", [f"a{i}" for i in range(20)])
    write_chat(tmp_path / "a/1.jsonl", [f"a{i}" for i in range(20, 30)])
    write_chat(tmp_path / "b.jsonl", [f"b{i}" for i in range(7)])
    info = "a: {file_name: a}\nb: {file_name: b.jsonl}\n"
    (tmp_path / "info.yaml").write_text(info)
    return tmp_path


def _stream(folder, names=("a",), **options):
    options = {"buffer_size": 8, **options}
    return read_sets(
        dataset_path=None, info=str(folder / "info.yaml"), names=list(names), streaming=True,
        **options,
    )  # fmt: skip


def test_an_epoch_has_each_row_once_and_the_next_another_order(folder):
    found = asked(_stream(folder), 90)
    epochs = [found[:30], found[30:60], found[60:]]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 30 and len(set(map(tuple, epochs))) == 3
    assert found == asked(_stream(folder), 90)
    assert found != asked(_stream(folder, seed=1), 90)
    # a row moves forward by less than the buffer
    assert all(int(question[1:]) - place <= 8 for place, question in enumerate(epochs[0]))
    assert asked(_stream(folder, buffer_size=1), 31) == [*(f"a{i}" for i in range(30)), "a0"]


def test_sets_are_mixed_as_they_are_without_streaming(folder):
    for options in (
        {"mix": "concat"},
        {"mix": "interleave_under"},
        {"mix": "interleave_over"},
        {"mix": "interleave_over", "probabilities": [0.3, 0.7]},
        {"mix": "interleave_under", "probabilities": [0.3, 0.7]},
    ):
        whole = read_sets(
            dataset_path=None, info=str(folder / "info.yaml"), names=["a", "b"],
            cache=str(folder / "cache"), **options,
        )  # fmt: skip
        found = asked(_stream(folder, ["a", "b"], buffer_size=1, **options), len(whole))
        assert found == asked(whole), options


def test_rows_may_be_asked_for_in_any_order_and_from_anywhere(folder, monkeypatch):
    monkeypatch.setattr(streams, "KEPT", 4)
    expected = asked(_stream(folder, buffer_size=2), 60)
    stream = _stream(folder, buffer_size=2)
    for place in (41, 40, 39, 38, 42, 3, 59, 0):
        assert stream[place][1]["messages"][0]["content"] == expected[place]
        assert stream.describe(place).endswith(f":{int(expected[place][1:]) % 20 + 1}")


def test_the_first_rows_are_held_out_of_every_epoch(folder):
    for options in (
        {"val_size": 4},
        {"names": ["b", "a"], "val_size": 5, "mix": "interleave_over"},
    ):
        test = asked(_stream(folder, split="test", **options))
        train = asked(_stream(folder, **options), 150)
        assert len(set(test)) == options["val_size"] and not set(test) & set(train)
    assert asked(_stream(folder, split="test", val_size=4)) == ["a0", "a1", "a2", "a3"]
    path = str(folder / "b.jsonl")
    options = {"eval_path": path, "cache": str(folder / "cache"), "split": "test"}
    assert asked(_stream(folder, **options)) == [f"b{i}" for i in range(7)]


def test_no_more_of_a_stream_is_read_than_is_asked_for(tmp_path, monkeypatch):
    path = write_chat(tmp_path / "a.jsonl", [f"a{i}" for i in range(1000)])
    read = []
    rows = streams.stream_rows
    monkeypatch.setattr(
        streams,
        "stream_rows",
        lambda *args, **kw: (read.append(0) or row for row in rows(*args, **kw)),
    )
    stream = read_sets(dataset_path=str(path), streaming=True, buffer_size=10)
    assert read == [], "read when it was made"
    asked(stream, 20)
    assert len(read) <= 32


def _numbers(samples):
    found = [[int(sample["messages"][0]["content"][1:])] for _, sample in samples]
    return {"input_ids": torch.tensor(found), "labels": torch.tensor(found)}


def _steps(stream, count, **options):
    options = {"collate": _numbers, "batch_size": 4, "micro_batch_size": 2, **options}
    loader = MicroBatchLoader(stream, **options)
    return [
        [int(number) for batch in step for number in batch["labels"][:, 0]]
        for step in itertools.islice(loader, count)
    ]


def test_replicas_get_other_rows_and_a_resumed_run_goes_on_where_it_was(folder):
    whole = [int(question[1:]) for question in asked(_stream(folder), 80)]
    single = _steps(_stream(folder), 10, batch_size=8)
    assert sum(single, []) == whole
    replicas = [_steps(_stream(folder), 10, dp_rank=rank, dp_degree=2) for rank in range(2)]
    assert [a + b for a, b in zip(*replicas, strict=True)] == single
    assert _steps(_stream(folder), 3, batch_size=8, start_step=7) == single[7:]


def test_a_worker_reads_what_this_process_reads(folder):
    stream = _stream(folder)
    expected = _steps(stream, 6)
    assert _steps(stream, 4, num_workers=1, start_step=2) == expected[2:]


def test_forked_processes_do_not_share_their_place_in_a_file(tmp_path):
    path = write_chat(tmp_path / "a.jsonl", [f"a{i}" + "." * 500 for i in range(300)])
    stream = read_sets(dataset_path=str(path), streaming=True, buffer_size=1)
    asked(stream, 10)
    child = multiprocessing.get_context("fork").Process(target=asked, args=(stream, 200))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert [question.strip(".") for question in asked(stream, 300)] == [f"a{i}" for i in range(300)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buffer_size": 0}, "at least 1"),
        ({"val_size": 0.1}, "Give a number of rows"),
        ({"val_size": -1}, "Give a number of rows"),
        ({"val_size": 31}, "has 30 rows"),
        ({"max_samples": 3}, "num_samples and max_samples do not work with"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options, words, folder):
    with pytest.raises(UserError, match=words):
        _stream(folder, **options)


def test_a_stream_of_nothing_ends(folder):
    with pytest.raises(DataError, match="no row to train on"):
        _stream(folder, val_size=30)[0]
    (folder / "list.json").write_text("[]")
    with pytest.raises(UserError, match="JSON list is read as a whole"):
        read_sets(dataset_path=str(folder / "list.json"), streaming=True)


def test_bad_rows_of_a_stream_name_their_line_or_have_no_position(folder):
    path = folder / "b.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(f'{lines[0]}{{"x"\n{lines[1]}{{"nothing": 1}}\n{"".join(lines[2:])}')
    stream = read_sets(dataset_path=str(path), streaming=True, buffer_size=1)
    with pytest.raises(DataError, match=f"{path}:2"):
        asked(stream, 7)
    with leaving_out(BadRows(2)) as bad:
        stream = read_sets(dataset_path=str(path), streaming=True, buffer_size=1)
    assert asked(stream, 14) == [f"b{i}" for i in range(7)] * 2
    assert list(bad.reasons) == [f"{path}:2", f"{path}:4"]


def test_the_fingerprint_of_a_stream(folder):
    first = _stream(folder).fingerprint()
    assert first == _stream(folder).fingerprint()
    others = [
        _stream(folder, seed=1),
        _stream(folder, buffer_size=9),
        _stream(folder, val_size=1),
        _stream(folder, ["a", "b"]),
    ]
    path = folder / "a/1.jsonl"
    path.write_text(path.read_text().replace("a29", "a28"))
    assert len({first, _stream(folder).fingerprint(), *(o.fingerprint() for o in others)}) == 6
