"""Files become documents: line ends, refusals, and that the division into parts does not matter."""

import bz2
import gzip
import json
import os
import random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus.input import default_document, find_sources, iter_chunks, read_chunk
from stageline.errors import DataError, UserError

LIMIT = 1 << 20
PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(
    files, *, chunk_bytes=64, limit=LIMIT, document=default_document, first=(0, 0), columns=None
):
    """(texts, {line: kind of what is wrong}, lines) of all chunks; lines counted over the file."""
    texts, bad, num_lines, file = [], {}, 0, None
    chunks = iter_chunks(
        find_sources(files),
        first=first,
        max_document_bytes=limit,
        columns=columns,
        chunk_bytes=chunk_bytes,
    )
    for chunk in chunks:
        num_lines = num_lines if chunk.file == file else 0
        file = chunk.file
        rows = read_chunk(chunk, document=document, max_document_bytes=limit)
        texts += rows.texts
        bad |= {num_lines + item.line: item.kind for item in rows.bad}
        num_lines += rows.num_lines
    return texts, bad, num_lines


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("readers") / "lines.txt"


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from([b"\n", b"a", b"bcd", b"\r\n", "\u00e9\u2028".encode(), b"\xff"])
    ),
    chunk_bytes=st.integers(1, 9),
    limit=st.integers(1, 7),
)
def test_lines_are_those_of_split_however_the_file_is_divided(file, pieces, chunk_bytes, limit):
    data = b"".join(pieces)
    file.write_bytes(data)
    texts, bad = [], {}
    for number, line in enumerate(data.replace(b"\r\n", b"\n").split(b"\n"), start=1):
        if len(line) > limit:
            bad[number] = "too long"
        elif b"\xff" in line:
            bad[number] = "invalid UTF-8"
        elif not line:
            bad[number] = "empty document"
        else:
            texts.append(line.decode())
    if data == b"" or data.endswith(b"\n"):
        bad.pop(number)  # nothing comes after the last line's end
    packed = file.with_name("packed.txt.gz")
    packed.write_bytes(gzip.compress(data, 1))
    for path in (file, packed):
        found = read(path, chunk_bytes=chunk_bytes, limit=limit)
        assert found == (texts, bad, len(texts) + len(bad))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_compressed_file_gives_what_the_plain_one_gives(suffix, tmp_path):
    draw = random.Random(3)
    lines = ["".join(draw.choices("ab\u4e2d ", k=draw.choice([1, 9, 40, 500]))) for _ in range(200)]
    data = "\n".join(lines).encode()
    plain, packed = tmp_path / "a.txt", tmp_path / f"a.txt{suffix}"
    plain.write_bytes(data)
    # two frames, divided inside a line
    packed.write_bytes(PACK[suffix](data[:1001]) + PACK[suffix](data[1001:]))
    wanted = read(plain, limit=300)
    assert "too long" in wanted[1].values() and wanted[2] == 200
    assert read(packed, limit=300) == wanted
    assert read(packed, limit=300, chunk_bytes=1 << 20) == wanted


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_a_compressed_file_that_ends_too_early_is_refused(suffix, tmp_path):
    path = tmp_path / f"a.txt{suffix}"
    whole = PACK[suffix](b"".join(b"%x\n" % (i * i) for i in range(20_000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.txt.*cannot be decompressed to its end"):
        read(path)


def test_chunks_can_be_begun_at_any_of_them(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    texts = [f"document {i} " * (i % 7 + 1) for i in range(100)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "c.parquet", row_group_size=30
    )
    sources = find_sources(tmp_path)
    chunks = list(iter_chunks(sources, max_document_bytes=LIMIT, chunk_bytes=300))
    assert len({chunk.part for chunk in chunks if chunk.file == 2}) > 8
    for number in range(0, len(chunks), 3):
        first = (chunks[number].file, chunks[number].part)
        rest = iter_chunks(sources, first=first, max_document_bytes=LIMIT, chunk_bytes=300)
        assert list(rest) == chunks[number:]
    assert read(tmp_path)[0] == 3 * texts
    done = [sum(c.num_bytes for c in chunks if c.file == file) for file in range(3)]
    assert done[:2] == [source.size for source in sources[:2]]
    assert done[2] == pytest.approx(sources[2].size, rel=0.3)


BAD = {
    '{"text": "a"}': None,
    '{"text": "\\u00e9\\n"}': None,
    "   ": None,
    '{"text": "a"': "bad JSON",
    '["a"]': "bad JSON",
    '"a"': "bad JSON",
    "[" * 100_000: "bad JSON",
    '{"txt": "a"}': "missing field",
    '{"text": null}': "not text",
    '{"text": ["a"]}': "not text",
    '{"text": ""}': "empty document",
    '{"text": "\\ud83d"}': "lone surrogate",
}


def test_each_kind_of_bad_json_line_is_told_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(BAD))
    texts, bad, num_lines = read(path)
    assert texts == ["a", "\u00e9\n"] and num_lines == len(BAD)
    assert bad == {n: kind for n, kind in enumerate(BAD.values(), start=1) if kind}


def test_a_document_function_gets_rows_and_its_errors_are_bad_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x", "b": 1}\n{"a": "y"}\n{"a": null, "b": 2}\n')

    def document(row):
        return row["a"] + str(row["b"])

    texts, bad, _ = read(path, document=document)
    assert texts == ["x1"] and bad == {2: "missing field", 3: "refused"}


def test_parquet_with_other_text_than_utf8(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([b"good", b"\xff\xfe", None, b"", b"fine" * 100], pyarrow.binary())
    table = pyarrow.table({"text": raw.view(pyarrow.string()), "other": [1, 2, 3, 4, 5]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    texts, bad, num_lines = read(tmp_path / "a.parquet", limit=100)
    assert texts == ["good"] and num_lines == 5
    assert list(bad.values()) == ["invalid UTF-8", "not text", "empty document", "too long"]
    with pytest.raises(DataError, match="has no column body; it has text, other"):
        read(tmp_path / "a.parquet", columns=["body"])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(tmp_path / "a.parquet")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read(tmp_path / "a.jsonl")[0] == ["a"]


def test_names_patterns_and_folders(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.txt.zst", ".hidden/d.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = [os.path.relpath(source.path, tmp_path) for source in find_sources(tmp_path)]
    assert names == ["a.jsonl", "b.txt", "sub/c.txt.zst"]
    found = find_sources([tmp_path / "b.txt", f"{tmp_path}/**/*.zst"])
    assert [source.path for source in found] == [f"{tmp_path}/b.txt", f"{tmp_path}/sub/c.txt.zst"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["none.txt"], "there is no file .*none.txt"),
        (["notes.md"], "ends in '.md'"),
        (["empty"], "holds no file to build from"),
        (["b.txt", "*.txt"], "are the same file"),
    ],
)
def test_what_is_no_input_is_refused(names, words, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("b.txt", "notes.md"):
        (tmp_path / name).write_text("a\n")
    with pytest.raises(UserError, match=words):
        find_sources([tmp_path / name for name in names])


def test_one_json_list_is_refused(tmp_path):
    text = json.dumps([{"text": "a"}], indent=1)
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.json", "b.json.gz"):
        with pytest.raises(DataError, match="one JSON list"):
            read(tmp_path / name)
