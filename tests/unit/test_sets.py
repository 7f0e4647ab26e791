"""The part `sets`: a register of sets, draws of their rows, and two sides without a common row."""

import dataclasses
import json
from collections import Counter

import pytest
import yaml

from options.fields import OptionError, absolute, check_limits
from options.train import RunConfig
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.data.rows.readers import data_fingerprint
from stageline.data.rows.sets import read_sets
from stageline.errors import DataError, UserError
from tests.helpers.tiny_datasets import picture, write_lines
from tests.helpers.tiny_sets import asked, chat_row, write_chat


@pytest.fixture
def folder(tmp_path):
    """Return two sets of 4 and 10 rows with a register of them."""
    write_chat(tmp_path / "small.jsonl", [f"s{i}" for i in range(4)])
    for part in range(2):
        write_chat(tmp_path / f"large/{part}.jsonl", [f"l{part}{i}" for i in range(5)])
    info = {
        "small": {"file_name": "small.jsonl", "formatting": "openai"},
        "large": {"file_name": "large", "columns": {"messages": "messages"}},
        "some": {"file_name": "large/*.jsonl", "num_samples": 25},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def _sets(folder, **options):
    options = {"info": str(folder / "dataset_info.json"), **options}
    return read_sets(dataset_path=None, cache=str(folder / "cache"), **options)


def test_a_register_chooses_sets_and_groups_are_called_by_them(folder):
    dataset = _sets(folder, names=["large", "small"])
    assert asked(dataset) == [f"l{p}{i}" for p in range(2) for i in range(5)] + [
        f"s{i}" for i in range(4)
    ]
    images, sample = dataset[12]
    assert images is None
    assert sample["group"] == "small" and sample["source"] == f"{folder / 'small.jsonl'}:3"
    assert dataset.describe(12) == sample["source"]
    ids = [dataset[row][1]["id"] for row in range(len(dataset))]
    assert len(set(ids)) == 14
    with pytest.raises(IndexError):
        dataset[14]


def test_a_register_may_be_yaml_and_lie_in_the_folder_of_the_data(folder):
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "sets.yaml").write_text(yaml.safe_dump(info))
    by_yaml = _sets(folder, info=str(folder / "sets.yaml"), names=["small"])
    in_folder = read_sets(dataset_path=str(folder), names=["small"], cache=str(folder / "cache"))
    assert asked(by_yaml) == asked(in_folder) == asked(_sets(folder, names=["small"]))


def test_null_in_a_register_means_not_given(folder):
    path = folder / "dataset_info.json"
    names = ("subset", "folder", "ranking", "num_samples", "split")
    entry = {"file_name": "small.jsonl", **dict.fromkeys(names)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "nulls": entry}))
    assert asked(_sets(folder, names=["nulls"])) == asked(_sets(folder, names=["small"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["smal"]}, "no such set. Did you mean small"),
        ({"names": ["bad_key"]}, "'colums', which is not known. Did you mean columns"),
        ({"names": ["elsewhere"]}, "'hf_hub_url', which is not known.*hub:owner/name"),
        ({"names": ["bad_type"]}, "ranking 'yes'"),
        ({"names": ["gone"]}, "gone: file_name .*there is no such file"),
        ({"names": ["small"], "formatting": "alpaca"}, "--dataset.formatting does not work with"),
        ({"names": ["small"], "split": "test"}, "there are no held-out rows"),
        (
            {"names": ["small"], "val_size": 1, "eval_names": ["large"]},
            "eval_names does not work with --dataset.val_size",
        ),
        ({"info": "nowhere.json", "names": ["small"]}, "cannot be read"),
        ({"info": None}, "neither --dataset-path nor"),
    ],
)
def test_what_the_register_does_not_have_is_told(change, words, folder):
    path = folder / "dataset_info.json"
    more = {
        "bad_key": {"file_name": "small.jsonl", "colums": {}},
        "elsewhere": {"hf_hub_url": "a/b"},
        "bad_type": {"file_name": "small.jsonl", "ranking": "yes"},
        "gone": {"file_name": "gone.jsonl"},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    with pytest.raises(UserError, match=words):
        _sets(folder, **change)


def test_num_samples_are_drawn_before_max_samples_are_kept(folder):
    drawn = _sets(folder, names=["some"])
    assert len(drawn) == 25
    assert set(asked(drawn)[:10]) == set(asked(_sets(folder, names=["large"])))
    assert set(Counter(asked(drawn)).values()) > {1}
    assert asked(_sets(folder, names=["some"], max_samples=7)) == asked(drawn)[:7]
    kept = _sets(folder, names=["small", "large"], max_samples=5)
    assert asked(kept) == ["s0", "s1", "s2", "s3", "l00", "l01", "l02", "l03", "l04"]
    assert asked(drawn) != asked(_sets(folder, names=["some"], seed=1))


def test_a_path_may_be_a_pattern_or_a_name_of_the_hub():
    item = next(item for item in dataclasses.fields(RunConfig) if item.name == "dataset_path")
    for place in ("data/*.jsonl", "hub:owner/name"):
        check_limits(RunConfig(dataset_path=place))
    assert absolute(item, "hub:owner/name") == "hub:owner/name"
    assert absolute(item, "data/*.jsonl").endswith("/data/*.jsonl")
    with pytest.raises(OptionError, match="no such file"):
        check_limits(RunConfig(dataset_path="nowhere.jsonl"))


@pytest.mark.parametrize(("names", "size"), [(["small", "large"], 3), (["some"], 0.3)])
def test_no_row_is_on_both_sides(names, size, folder):
    whole = asked(_sets(folder, names=names))
    train = asked(_sets(folder, names=names, val_size=size))
    test = asked(_sets(folder, names=names, val_size=size, split="test"))
    assert not set(train) & set(test)
    assert len(set(test)) == len(test), "a row is evaluated twice"
    assert len(test) == (size if isinstance(size, int) else round(size * len(set(whole))))
    assert train == [question for question in whole if question not in test]
    assert test == asked(_sets(folder, names=names, val_size=size, split="test"))


def test_sets_to_evaluate_on(folder):
    options = {"names": ["small"], "eval_names": ["some", "large"]}
    assert asked(_sets(folder, **options)) == ["s0", "s1", "s2", "s3"]
    test = asked(_sets(folder, **options, split="test"))
    assert sorted(test[:10]) == test[10:], "each row of `some` once, though 25 are asked for"
    path = str(folder / "large/1.jsonl")
    test = read_sets(dataset_path=None, eval_path=path, split="test", cache=str(folder / "cache"))
    assert asked(test) == [f"l1{i}" for i in range(5)]


def test_a_row_that_cannot_be_converted_names_its_line_or_is_left_out(folder):
    path = write_chat(folder / "bad.jsonl", ["a", "b", "c"])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"nothing": "of use"}\n' + "".join(lines[1:]))
    options = {"dataset_path": str(path), "cache": str(folder / "cache")}
    with pytest.raises(DataError, match=f"{path}:2"):
        read_sets(**options)
    with leaving_out(BadRows(1)) as bad:
        assert sorted(asked(read_sets(**options, num_samples=3))) == ["a", "b", "c"]
    assert list(bad.reasons) == [f"{path}:2"]


def test_pictures_are_opened_when_a_row_is_asked_for(tmp_path):
    write_lines(
        tmp_path / "a.jsonl", [{**chat_row(f"{i}"), "images": [f"{i}.png"]} for i in (0, 1)]
    )
    picture(tmp_path / "images/0.png", (7, 5))
    dataset = read_sets(dataset_path=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    assert dataset[0][0][0].size == (7, 5)
    with pytest.raises(DataError, match=r"a.jsonl:2: .*there is no image 1.png"):
        dataset[1]


def test_videos_become_frames_where_they_stood(tmp_path):
    for number in range(10):
        picture(tmp_path / f"video/{number}.png", (number + 5, 5))
    (tmp_path / "video/notes.txt").write_text("")
    picture(tmp_path / "a.png", (50, 5))
    parts = [{"type": kind} for kind in ("video", "image", "video")]
    row = chat_row("")
    row["messages"][0]["content"] = [*parts, {"type": "text", "text": "What?"}]
    row |= {"images": ["a.png"], "videos": ["video", ["video/9.png", "video/8.png"]]}
    write_lines(tmp_path / "rows.jsonl", [row])

    def read(**options):
        path = str(tmp_path / "rows.jsonl")
        return read_sets(dataset_path=path, cache=str(tmp_path / "cache"), **options)[0]

    images, sample = read(num_frames=5)
    widths = [image.size[0] - 5 for image in images]
    assert widths == [0, 2, 4, 6, 9, 45, 9, 8]
    content = sample["messages"][0]["content"]
    assert content == [{"type": "image"}] * 8 + [{"type": "text", "text": "What?"}]
    assert "videos" not in sample
    assert len(read(num_frames=99)[0]) == 13
    for videos, words in ((["video"], "places for videos"), (["../..", "video"], "leads out")):
        write_lines(tmp_path / "rows.jsonl", [{**row, "videos": videos}])
        with pytest.raises(DataError, match=words):
            read()


def test_the_fingerprint_tells_other_rows_and_not_other_folders(folder, tmp_path_factory):
    path = folder / "small.jsonl"
    other = tmp_path_factory.mktemp("other")

    def fingerprint(file=path, **options):
        return data_fingerprint(
            read_sets(dataset_path=str(file), cache=str(other / "cache"), **options)
        )

    first = fingerprint()
    (other / "small.jsonl").write_bytes(path.read_bytes())
    assert fingerprint(other / "small.jsonl") == first == fingerprint()
    changed = [
        fingerprint(max_samples=3),
        fingerprint(num_samples=4),
        fingerprint(val_size=1),
        fingerprint(formatting="openai"),
        fingerprint(columns={"messages": "messages"}),
    ]
    path.write_text(path.read_text().replace("s3", "s4"))
    assert len({first, *changed, fingerprint()}) == 7


def test_processes_that_start_together_make_the_files_once(folder):
    import multiprocessing

    def read(_):
        return asked(_sets(folder, names=["small", "large"]))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read, args=(i,)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 2
    assert len(list((folder / "cache").rglob("*.arrow"))) == 3
