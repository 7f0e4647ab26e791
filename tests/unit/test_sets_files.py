"""Files of every kind become the same rows; whatever is wrong with one names file and line."""

import json

import datasets
import pytest

from stageline.data.rows import read_rows
from stageline.data.rows.bad_rows import BadRows, current_bad_rows, leaving_out
from stageline.data.rows.read_rows import find_files, open_tables, stream_rows
from stageline.errors import DataError, UserError

# values that a reader that guesses types would change: a date, a number with zeros, NA
ROWS = [
    {"question": "2020-01-01", "answer": "007"},
    {"question": 'two\nlines, "quoted" and 中文', "answer": "NA"},
    {"question": "line\u2028separator\x85", "answer": "1e5"},
]


def _write(folder, kind, rows=ROWS):
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    elif kind == "csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        folder = path.with_suffix("")
        datasets.Dataset.from_list(rows).save_to_disk(folder)
        next(folder.glob("*.arrow")).rename(path)
    return path


def _read(path, cache):
    rows = open_tables(find_files(str(path)), cache=cache)
    return [(row.data, row.source) for row in rows]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_kind_gives_the_same_rows(kind, tmp_path):
    path = _write(tmp_path, kind)
    found = _read(path, tmp_path / "cache")
    assert [row for row, _ in found] == ROWS
    sources = {
        "jsonl": [f"{path}:{line}" for line in (1, 3, 5)],  # blank lines count
        "csv": [f"{path}:{line}" for line in (2, 3, 5)],  # the second has a line break
    }
    assert [source for _, source in found] == sources.get(
        kind, [f"{path}: row {number}" for number in (1, 2, 3)]
    )


def test_nulls_of_json_columns_are_those_of_json_lines(tmp_path):
    """In other columns a key without a value is one that another row has."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": [None]}}}
    tool = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    rows = [
        {"messages": [{"role": "user", "content": "?"},
                      {"role": "assistant", "content": "", "tool_calls": [call]}],
         "tools": [tool]},
        {"messages": [{"role": "user", "content": "?", "name": "n"}], "tools": []},
    ]  # fmt: skip
    message = {name: datasets.Value("string") for name in ("role", "content", "name")}
    message["tool_calls"] = datasets.Json()
    features = datasets.Features({"messages": [message], "tools": datasets.Json()})
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    lines = _read(_write(tmp_path, "jsonl", rows), tmp_path / "cache")
    assert [row for row, _ in _read(path, tmp_path / "cache")] == [row for row, _ in lines] == rows
    streamed = stream_rows(path, "parquet", take=current_bad_rows().take)
    assert [row.data for row in streamed] == rows


def test_a_line_of_text_is_a_row_with_its_blanks(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\n  two \x85 \xc3\xa9\n".replace(b"\x85", b"\xc2\x85"))
    assert _read(path, tmp_path / "cache") == [
        ({"text": "one"}, f"{path}:1"),
        ({"text": "  two \x85 é"}, f"{path}:3"),
    ]


def test_rows_of_one_file_may_have_other_keys_and_types(tmp_path):
    calls = [{"name": "f", "arguments": {"city": "x"}}, {"name": "g", "arguments": {"n": [1, "a"]}}]
    rows = [{"text": "t", "calls": calls[:1]}, {"calls": calls, "text": "u", "more": None}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row for row, _ in _read(path, tmp_path / "cache")] == rows


def test_a_table_gives_no_keys_that_only_other_rows_have(tmp_path):
    calls = [[{"arguments": {"city": "x"}}], [{"arguments": {"n": 1}}]]
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"calls": calls}), path)
    assert [row["calls"] for row, _ in _read(path, tmp_path / "cache")] == calls


def test_files_of_a_set_are_sorted_and_of_one_kind(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json", ".hidden.jsonl", "README.md"):
        (tmp_path / name).write_text("[]")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match=r"2 kinds: (a.jsonl, c.json)"):
        find_files(str(tmp_path))
    (tmp_path / "c.json").unlink()
    for place in (tmp_path, tmp_path / "*.jsonl"):
        found = find_files(str(place))
        assert [path.name for path in found.paths] == ["a.jsonl", "b.jsonl"]
        assert found.folder == tmp_path
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/d.jsonl").write_text("")
    deep = find_files(str(tmp_path / "**/[d].jsonl"))
    assert [path.name for path in deep.paths] == ["d.jsonl"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("a.jsn", "Did you mean"),
        ("*.csv", "names no file of rows"),
        ("x.xml", "names no file of rows; it has x.xml"),
    ],
)
def test_a_place_without_rows_is_refused(place, words, tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "x.xml").write_text("")
    with pytest.raises(UserError, match=words):
        find_files(str(tmp_path / place))


BROKEN = {
    "jsonl": ('{"text": "a"}\n{"text": }\n{"text": "c"}\n', ":2:10: no JSON"),
    "json": (
        '[{"text": "a"},\n {"text": NaN},\n {"text": "c"}]',
        ": row 2: NaN and Infinity are",
    ),
    "csv": ("text,x\na,1\nb,2,3\nc,4\n", ":3: no CSV .3 cells in 2 columns"),
    "tsv": ('text\tx\na\t1\nb\t"2"2\nc\t4\n', ":3: no CSV"),
    "txt": ("a\nb\udcff\nc\n", ":2: not UTF-8"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_names_file_and_line_or_is_left_out(kind, tmp_path):
    content, words = BROKEN[kind]
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    for _ in range(2):  # made, then found in the cache
        with pytest.raises(DataError, match=f"{path}.*{words}|{path}{words}"):
            _read(path, tmp_path / "cache")
        with leaving_out(BadRows(1)) as bad:
            assert [row["text"] for row, _ in _read(path, tmp_path / "cache")] == ["a", "c"]
        assert len(bad) == 1 and str(path) in next(iter(bad.reasons))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_cut_table_names_its_file(kind, tmp_path):
    path = _write(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=f"{path} cannot be read as {kind}"):
        _read(path, tmp_path / "cache")


def test_a_hub_name_without_a_network_is_told(tmp_path):
    with pytest.raises(UserError, match="hub:nobody/nothing cannot be loaded"):
        open_tables(find_files("hub:nobody/nothing"), cache=tmp_path)


def test_what_was_made_of_a_file_is_used_again_until_it_changes(tmp_path, monkeypatch):
    path = _write(tmp_path, "jsonl")
    cache = tmp_path / "cache"
    made = []
    make = read_rows.each_row
    monkeypatch.setattr(
        read_rows, "each_row", lambda *args, **kw: made.append(args) or make(*args, **kw)
    )
    for _ in range(2):
        assert [row for row, _ in _read(path, cache)] == ROWS
    assert len(made) == 1
    _write(tmp_path, "jsonl", ROWS[:2])
    assert [row for row, _ in _read(path, cache)] == ROWS[:2]
    assert len(made) == 2


def test_a_table_is_mapped_and_not_in_memory(tmp_path):
    path = _write(tmp_path, "jsonl")
    table = open_tables(find_files(str(path)), cache=tmp_path / "cache").tables[0]
    assert [item["filename"] for item in table.rows.cache_files]
