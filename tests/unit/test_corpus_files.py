"""The files of a corpus: what is written is read again, and each kind of damage is named."""

import os
from dataclasses import replace

import numpy
import pytest

from stageline.corpus.corpus_files import Corpus, open_corpus
from stageline.corpus.header import (
    EDGE_BYTES,
    MAGIC,
    VERSION,
    decode_header,
    dtype_for,
    edges_digest,
    framed,
    path_of,
)
from stageline.corpus.writer import CorpusWriter, name_files
from stageline.errors import DataError, StorageError
from tests.helpers.corpora import RULES, documents_of, segments_of, tokenizer, write


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, "uint16"), (65537, "uint32")])
def test_what_was_written_is_read_again(tmp_path, vocab_size, dtype):
    documents = documents_of([3, 20, 6, 14, 0, 40, 1], vocab_size=vocab_size)
    corpus = write(tmp_path / "a.b", documents, vocab_size=vocab_size, sources=["x.txt"])
    pieces = [piece for document in documents for piece in document]
    assert [corpus[i].tolist() for i in range(len(corpus))] == pieces
    assert [corpus[i].tolist() for i in numpy.array([4, 0, 4])] == [
        pieces[4],
        pieces[0],
        pieces[4],
    ]
    assert corpus[-1].tolist() == pieces[-1] and corpus[0].dtype == numpy.int64
    assert corpus.lengths().tolist() == [len(piece) for piece in pieces]
    assert corpus.lengths(2, 5).tolist() == [len(piece) for piece in pieces[2:5]]
    assert corpus.header.dtype == dtype and corpus.header.sources == ("x.txt",)
    assert (
        path_of(tmp_path / "a.b", ".bin").stat().st_size
        == corpus.header.num_tokens * int(dtype[4:]) // 8
    )


def test_documents_come_back_without_bos_and_eos(tmp_path):
    documents = documents_of([3, 20, 6, 14, 0, 40, 1])
    corpus = write(tmp_path / "a", documents)
    texts = [[token for piece in doc for token in piece][1:-1] for doc in documents]
    ranges = list(corpus.documents())
    assert [corpus.document_tokens(*one).tolist() for one in ranges] == texts
    for start in range(len(corpus)):  # documents that begin in a range come whole
        for stop in range(start, len(corpus) + 1):
            inside = [one for one in ranges if start <= one[0] < stop]
            assert list(corpus.documents(start, stop)) == inside
    assert corpus.header.num_documents == 7


def resumed(prefix, state, **settings):
    base = {"tokenizer": tokenizer(), "rules": RULES, "language": "en", **settings}
    return CorpusWriter(prefix, **base, state=state)


def test_killed_between_two_renames_goes_on(tmp_path, monkeypatch):
    write(tmp_path / "a", documents_of([30]))  # its index must not be left next to the new tokens
    writer = CorpusWriter(
        tmp_path / "a", tokenizer=tokenizer(), rules=RULES, language="en", overwrite=True
    )
    writer.add(segments_of(documents_of([3, 20])))
    real = os.replace

    def killed(source, target):
        if str(target).endswith(".dis"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    monkeypatch.setattr(os, "replace", real)
    with pytest.raises(DataError, match="parts of an unfinished corpus"):
        Corpus(tmp_path / "a")
    name_files(tmp_path / "a")
    assert len(Corpus(tmp_path / "a")) == 4


@pytest.mark.parametrize("change", ["cut", "other", "gone"])
def test_parts_that_changed_are_not_gone_on_with(tmp_path, change):
    writer = CorpusWriter(tmp_path / "a", tokenizer=tokenizer(), rules=RULES, language="en")
    writer.add(segments_of(documents_of([30])))
    state = writer.state()
    part = path_of(tmp_path / "a", ".bin.part")
    content = part.read_bytes()
    if change == "gone":
        part.unlink()
    else:
        part.write_bytes(content[:-1] if change == "cut" else b"\xff" + content[1:])
    with pytest.raises(DataError, match="cannot be continued"):
        resumed(tmp_path / "a", state)


def test_a_full_disk_is_a_storage_error(tmp_path):
    writer = CorpusWriter(tmp_path / "a", tokenizer=tokenizer(), rules=RULES, language="en")
    writer._files["bin"]._file = open("/dev/full", "wb", buffering=0)
    with pytest.raises(StorageError, match="a.bin.part cannot be written: No space left"):
        writer.add(segments_of(documents_of([3])))


def test_an_id_too_large_is_named(tmp_path):
    writer = CorpusWriter(tmp_path / "a", tokenizer=tokenizer(), rules=RULES, language="en")
    writer.add(segments_of(documents_of([3])))
    documents = [[[1, 5, 2]], [[1, 1000, 2]]]
    with pytest.raises(DataError, match=r"id 1000 in segment 2 of .*'tiny'.* below 1000"):
        writer.add(segments_of(documents))


def test_an_empty_corpus_can_be_opened(tmp_path):
    corpus = write(tmp_path / "a", [])
    assert len(corpus) == 0 and list(corpus.documents()) == [] and corpus.lengths().size == 0


def test_a_digest_is_of_the_content_alone(tmp_path):
    header = write(tmp_path / "a", documents_of([3, 20])).header
    same = replace(header, sources=("elsewhere",), edges_sha256="", language="zh")
    assert same.digest == header.digest
    first, *others = header.types
    other = replace(header.tokenizer, fingerprint="other")
    for changed in (
        replace(header, arrays_sha256="0" * 64),
        replace(header, bin_sha256="0" * 64),
        replace(header, dtype="uint32"),
        replace(header, tokenizer=other),
        replace(header, types=(replace(first, num_segments=1), *others)),
    ):
        assert changed.digest != header.digest


def test_both_ends_of_a_file_and_its_size_are_looked_at(tmp_path):
    found = set()
    content = bytes(3 * EDGE_BYTES)
    for place in (None, 0, EDGE_BYTES - 1, -EDGE_BYTES, -1):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        (tmp_path / "a").write_bytes(changed)
        found.add(edges_digest(tmp_path / "a"))
    (tmp_path / "a").write_bytes(content + b"\0")
    found.add(edges_digest(tmp_path / "a"))
    assert len(found) == 6


# damage


def _cut(path, count=10):
    path.write_bytes(path.read_bytes()[:-count])


def _flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def _swap(tmp_path, suffix):
    target = path_of(tmp_path / "a", suffix)
    target.write_bytes(path_of(tmp_path / "b", suffix).read_bytes())


def _flip_header(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"seq_length": 8', b'"seq_length": 9'))


DAMAGES = {
    "truncated bin": (lambda p: _cut(p / "a.bin"), r"a\.bin is damaged: it has [\d,]+ bytes"),
    "truncated idx": (lambda p: _cut(p / "a.idx"), r"a\.idx is damaged: it has [\d,]+ bytes"),
    "empty idx": (lambda p: (p / "a.idx").write_bytes(b""), "begins with b''"),
    "swapped bin, same size": (lambda p: _swap(p, ".bin"), "swapped with another corpus"),
    "foreign": (lambda p: (p / "a.idx").write_bytes(b"\x7fELF" + bytes(5000)), "another program"),
    "damaged header": (lambda p: _flip_header(p / "a.idx"), "damaged: its checksum"),
    "no idx": (lambda p: (p / "a.idx").unlink(), r"a\.idx is missing"),
    "no bin": (lambda p: (p / "a.bin").unlink(), r"a\.bin is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_when_a_corpus_is_opened(tmp_path, damage):
    harm, words = DAMAGES[damage]
    write(tmp_path / "a", documents_of([30], seed=1))
    write(tmp_path / "b", documents_of([30], seed=2))
    harm(tmp_path)
    for reader in (Corpus, open_corpus):
        with pytest.raises(DataError, match=words) as error:
            reader(tmp_path / "a")
        assert error.value.exit_code == 3


def test_no_byte_of_an_index_can_change_unseen(tmp_path):
    write(tmp_path / "a", documents_of([30, 3]))
    path = tmp_path / "a.idx"
    whole = path.read_bytes()
    begin = decode_header(whole, path)[1]
    for place in (*range(20), *range(begin, len(whole))):
        path.write_bytes(whole)
        _flip(path, place)
        with pytest.raises(DataError):
            Corpus(tmp_path / "a")


def test_the_largest_vocabulary_of_two_bytes():
    assert (dtype_for(1 << 16), dtype_for((1 << 16) + 1)) == ("uint16", "uint32")


def test_the_next_version_is_not_read(tmp_path):
    with pytest.raises(DataError, match=f"has format version {VERSION + 1}"):
        decode_header(framed(MAGIC, VERSION + 1, "{}"), tmp_path / "a.idx")
