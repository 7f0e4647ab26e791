"""Files of Megatron-core, byte by byte as its source lays them out, and by its own reader."""

import struct

import numpy
import pytest

from stageline.corpus import corpus_files
from stageline.corpus.corpus_files import Corpus, MegatronCorpus, open_corpus
from stageline.corpus.header import BEGINS, ENDS, path_of
from stageline.corpus.pack import stats
from stageline.corpus.tools import from_megatron, merge, to_megatron, verify
from stageline.errors import DataError, UserError
from tests.helpers.corpora import documents_of, tokenizer, write

SIZES = [3, 20, 6, 14, 0, 40, 1]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(corpus_files, "STEP", 3)  # so that borders of steps fall everywhere
    monkeypatch.setattr(corpus_files, "TOKENS", 20)


def oracle(documents, *, code, letter):
    """Return (.bin, .idx) of a pair, written out by hand from indexed_dataset.py."""
    sequences = [piece for document in documents for piece in document]
    size = struct.calcsize(letter)
    tokens = b"".join(struct.pack(f"<{letter}", token) for piece in sequences for token in piece)
    borders, pointers, position = [0], [], 0
    for document in documents:
        borders.append(borders[-1] + len(document))
    for piece in sequences:
        pointers.append(position)
        position += size * len(piece)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code)
    index += struct.pack("<QQ", len(sequences), len(borders))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    return tokens, index + struct.pack(f"<{len(borders)}q", *borders)


def write_oracle(prefix, documents, **kind):
    tokens, index = oracle(documents, **(kind or {"code": 8, "letter": "H"}))
    path_of(prefix, ".bin").write_bytes(tokens)
    path_of(prefix, ".idx").write_bytes(index)


@pytest.mark.parametrize(("vocab_size", "code", "letter"), [(1000, 8, "H"), (70_000, 4, "i")])
def test_a_corpus_becomes_the_bytes_of_megatron(tmp_path, vocab_size, code, letter):
    documents = documents_of(SIZES, vocab_size=vocab_size)
    write(tmp_path / "a", documents, vocab_size=vocab_size)
    assert to_megatron(tmp_path / "a", tmp_path / "m") == [tmp_path / "m"]
    tokens, index = oracle(documents, code=code, letter=letter)
    assert path_of(tmp_path / "m", ".bin").read_bytes() == tokens
    assert path_of(tmp_path / "m", ".idx").read_bytes() == index


def test_each_type_becomes_a_pair_of_its_own(tmp_path):
    made = [documents_of(SIZES, seed=1), documents_of([9, 30], seed=2)]
    for name, documents in zip("ab", made):
        write(tmp_path / name, documents)
    merge([tmp_path / "a", tmp_path / "b"], [0, 1], tmp_path / "ab")
    targets = to_megatron(tmp_path / "ab", tmp_path / "m")
    assert targets == [tmp_path / "m_0", tmp_path / "m_1"]
    for target, documents in zip(targets, made):
        pair = (path_of(target, ".bin").read_bytes(), path_of(target, ".idx").read_bytes())
        assert pair == oracle(documents, code=8, letter="H")


@pytest.mark.parametrize(("code", "letter"), [(8, "H"), (4, "i"), (5, "q")])
def test_a_pair_is_read_like_a_corpus(tmp_path, code, letter):
    documents = documents_of(SIZES)
    write_oracle(tmp_path / "m", documents, code=code, letter=letter)
    ours, theirs = write(tmp_path / "a", documents), open_corpus(tmp_path / "m")
    assert isinstance(theirs, MegatronCorpus) and len(theirs) == len(ours)
    for index in range(-1, len(ours)):
        assert theirs[index].tolist() == ours[index].tolist()
    assert theirs.lengths(2, 7).tolist() == ours.lengths(2, 7).tolist()
    for start in range(len(ours)):
        expected = ours.flags(start, len(ours)) & (BEGINS | ENDS)
        assert theirs.flags(start).tolist() == expected.tolist()
        assert theirs.flags(0, start).tolist() == (ours.flags(0, start) & 3).tolist()
    assert list(theirs.documents()) == list(ours.documents())
    assert theirs.type_starts.tolist() == [0, len(ours)]
    # the documents have 16, 22 and 42 tokens
    assert stats(tmp_path / "m").whole.num_cut_documents == 3
    with pytest.raises(DataError, match="an index of Megatron-core; convert it first"):
        Corpus(tmp_path / "m")


def test_there_and_back_is_the_same_corpus(tmp_path):
    write(tmp_path / "a", documents_of(SIZES))
    to_megatron(tmp_path / "a", tmp_path / "m")
    from_megatron(tmp_path / "m", tmp_path / "b", tokenizer=tokenizer())
    verify(tmp_path / "b")
    assert Corpus(tmp_path / "a").digest == Corpus(tmp_path / "b").digest


def test_long_sequences_are_cut_evenly(tmp_path):
    documents = documents_of([3, 20, 0, 40], limit=1000)
    write_oracle(tmp_path / "m", documents)
    from_megatron(tmp_path / "m", tmp_path / "b", tokenizer=tokenizer(), seq_length=8)
    verify(tmp_path / "b")
    corpus = Corpus(tmp_path / "b")
    assert corpus.lengths().tolist() == [5, 8, 7, 7, 2, 7, 7, 7, 7, 7, 7]
    texts = [corpus.document_tokens(*one).tolist() for one in corpus.documents()]
    assert texts == [document[0][1:-1] for document in documents]


def test_ids_that_the_tokenizer_does_not_have_are_named(tmp_path):
    write_oracle(tmp_path / "m", [[[1, 999, 2]]])
    with pytest.raises(DataError, match="id 999 in segment 0 of .* below 500"):
        from_megatron(tmp_path / "m", tmp_path / "b", tokenizer=tokenizer(500))
    write_oracle(tmp_path / "n", [[[1, -5, 2]]], code=4, letter="i")
    with pytest.raises(DataError, match="n.bin holds -5; ids are 0 or more"):
        from_megatron(tmp_path / "n", tmp_path / "b", tokenizer=tokenizer(500))


def test_empty_documents_vanish_and_empty_ends_are_refused(tmp_path):
    write_oracle(tmp_path / "m", [[[]], [[1, 5, 2]], [], [[1, 6], [], [7, 2]]])
    from_megatron(tmp_path / "m", tmp_path / "b", tokenizer=tokenizer())
    verify(tmp_path / "b")
    corpus = Corpus(tmp_path / "b")
    assert [corpus.document_tokens(*one).tolist() for one in corpus.documents()] == [[5], [6, 7]]
    write_oracle(tmp_path / "n", [[[1, 5, 2]], [[], [1, 5, 2]]])
    with pytest.raises(DataError, match="Sequence 1 of .*/n is empty and begins"):
        from_megatron(tmp_path / "n", tmp_path / "c", tokenizer=tokenizer())
    assert not list(tmp_path.glob("c.*"))  # nothing half-made stays


@pytest.mark.parametrize(
    ("suffix", "harm", "words"),
    [
        (".bin", lambda old: old[:-2], r"m.bin is damaged: .*its index ends at"),
        (".idx", lambda old: old[:-8], r"m.idx is damaged: .*its header announces"),
        (".idx", lambda old: old[:20], "truncated or of another program"),
        (".idx", lambda old: old[:9] + b"\x02" + old[10:], "has version 2 and dtype code 8"),
        (".idx", lambda old: old[:17] + b"\x06" + old[18:], "has version 1 and dtype code 6"),
        (".idx", lambda old: old[:18] + b"\xff" * 8 + old[26:], "its header announces"),
        (".idx", lambda old: old[:26] + bytes(8) + old[34:], "its header announces"),
        (".idx", lambda old: old[:37] + b"\x80" + old[38:], "sequences do not follow"),
        (
            ".idx",
            lambda old: old[:34] + bytes([old[34] + 1]) + old[35:],
            "sequences do not follow",
        ),
        (".idx", lambda old: old[:-16] + b"\xff" * 8 + old[-8:], "documents do not go from"),
        (".idx", lambda old: old[:-8] + bytes(8), "documents do not go from"),
    ],
)
def test_damage_is_named(tmp_path, suffix, harm, words):
    write_oracle(tmp_path / "m", documents_of(SIZES))
    path = path_of(tmp_path / "m", suffix)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        open_corpus(tmp_path / "m")


def test_a_pair_is_overwritten_only_when_asked(tmp_path):
    write(tmp_path / "a", documents_of([3]))
    to_megatron(tmp_path / "a", tmp_path / "m")
    with pytest.raises(UserError, match="--overwrite"):
        to_megatron(tmp_path / "a", tmp_path / "m")
    with pytest.raises(UserError, match="not changed in place"):
        to_megatron(tmp_path / "a", tmp_path / "a", overwrite=True)
    to_megatron(tmp_path / "a", tmp_path / "m", overwrite=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_megatron_itself_reads_ours_and_we_read_its(tmp_path, vocab_size):
    """Runs where megatron-core is installed (0.16.1 was checked)."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = documents_of(SIZES, vocab_size=vocab_size)
    corpus = write(tmp_path / "a", documents, vocab_size=vocab_size)
    to_megatron(tmp_path / "a", tmp_path / "m")
    read = theirs.IndexedDataset(str(tmp_path / "m"))
    assert [read[i].tolist() for i in range(len(read))] == [row.tolist() for row in corpus]
    borders = [0, *(last for _, last in corpus.documents())]
    assert read.document_indices.tolist() == borders

    dtype = theirs.DType.optimal_dtype(vocab_size)
    builder = theirs.IndexedDatasetBuilder(str(path_of(tmp_path / "t", ".bin")), dtype=dtype)
    for document in documents:
        lengths = [len(piece) for piece in document]
        builder.add_document(numpy.concatenate(document).tolist(), lengths)
    builder.finalize(str(path_of(tmp_path / "t", ".idx")))
    for suffix in (".bin", ".idx"):
        same = path_of(tmp_path / "m", suffix).read_bytes()
        assert path_of(tmp_path / "t", suffix).read_bytes() == same
