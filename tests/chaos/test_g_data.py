"""Bad data (cases G): each is one DataError that names file and place, before it is trained on."""

import json

import pytest

from register import dataset_register, import_shelf
from stageline.data.rows.bad_rows import BadRows, leaving_out
from stageline.data.rows.read_rows import read_rows
from stageline.errors import DataError

import_shelf("dataset")
GOOD = b'{"question": "q", "answer": "a"}\n'


def rows_of(number):
    return [{"question": f"q{i}", "answer": f"a{i}"} for i in range(number)]


def refused(file, *words, **options):
    """The dataset of the file is refused with exit code 3 and all the words."""
    with pytest.raises(DataError) as caught:
        dataset_register["jsonl"](dataset_path=str(file), test_size=0, **options)
    assert (caught.value.exit_code, caught.value.kind) == (3, "data")
    for word in (file.name, *words):
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1500, "a message, not the data"


BAD_LINES = {
    "g01_broken_line": (b'{"question": "q", "answer": }\n', ":3:29: no JSON"),
    "g03_invalid_utf8": (b'{"question": "\xff", "answer": "a"}\n', ":3:", "not UTF-8", "byte 80 "),
    "g06_key_missing": (b'{"question": "q"}\n', ":3:", "no 'answer'"),
    "g06_image_is_a_number": (b'{"answer": "a", "image": 5}\n', ":3:", "image is 5"),
    "g07_nan": (b'{"answer": NaN}\n', ":3: NaN and Infinity are"),
    "g08_deep_list": (b'{"answer": ' + b"[" * 100_000 + b"\n", ":3:", "nested too deeply"),
    "g09_lone_surrogate": (b'{"question": "q\\ud83d", "answer": "a"}\n', "\\ud83d", "question"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line(case, tmp_path):
    """A bad line of JSON: refused by file, line and column, byte or key."""
    line, *words = BAD_LINES[case]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD * 2 + line + GOOD)
    refused(file, *words)
    # the same file is taken where one bad row may be left out; two are too many for one
    with leaving_out(BadRows(1)) as bad:
        dataset = dataset_register["jsonl"](dataset_path=str(file), test_size=0)
    assert len(dataset) == 3 and list(bad.reasons) == [f"{file}:3"]
    file.write_bytes(GOOD * 2 + line + GOOD + line)
    with leaving_out(BadRows(1)), pytest.raises(DataError, match="more than 1 bad rows"):
        dataset_register["jsonl"](dataset_path=str(file), test_size=0)


def test_g02_last_line_cut(tmp_path):
    """The last line of a file is cut: refused, with the hint that the file may be cut short."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes((GOOD * 3)[:-8])
    refused(file, ":3:", "may be cut short")
    file.write_bytes((GOOD * 3)[:-1])
    assert len(read_rows(file)) == 3, "a missing line break alone is no cut"
    file.write_bytes(GOOD + b'{"answer": \n' + GOOD[:-1])
    with pytest.raises(DataError) as caught:
        read_rows(file)
    assert "cut short" not in str(caught.value)


def test_g04_bom(tmp_path):
    """A byte order mark before the first line: accepted, and places stay right."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD * 2)
    assert [sorted(row.data) for row in read_rows(file)] == [["answer", "question"]] * 2
    file.write_bytes(b"\xef\xbb\xbf" + b'{"answer": "\xff"}\n')
    refused(file, ":1:", "byte 15 ")
    listed = tmp_path / "rows.json"
    listed.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows_of(2)).encode())
    assert len(read_rows(listed)) == 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("content", [b"", b"\n \r\n\n"])
def test_g05_empty_file(content, name, tmp_path):
    """An empty file or one of blanks: refused by name."""
    file = tmp_path / name
    file.write_bytes(content)
    refused(file, "is empty" if not content else f"has no rows in its {len(content)} bytes")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"answer": "a"},\n {"answer": NaN}]', ("row 2: NaN and Infinity are",)),
        ('[{"answer": "a"},\n 5]', ("row 2: the row is 5",)),
        ('[{"answer": "a"}\n {"answer": "b"}]', ("rows.json:2:2: no JSON", "',' delimiter")),
        ('{"answer": "a"}', ("holds a JSON dict",)),
    ],
    ids=lambda value: None if isinstance(value, tuple) else "",
)
def test_g07_bad_element_of_a_list(text, words, tmp_path):
    """A bad element of a JSON list: refused by file, line, column and row."""
    file = tmp_path / "rows.json"
    file.write_text(text)
    refused(file, *words)
