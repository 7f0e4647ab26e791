"""merge, remove, verify and stats of corpora, against plain lists."""

import tracemalloc

import numpy
import pytest

from stageline.corpus import corpus_files
from stageline.corpus.corpus_files import Corpus
from stageline.corpus.header import CutRules, path_of
from stageline.corpus.pack import stats
from stageline.corpus.tools import merge, remove, verify
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError
from tests.helpers.corpora import documents_of, segments_of, tokenizer, write


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(corpus_files, "STEP", 3)  # so that borders of steps fall everywhere
    monkeypatch.setattr(corpus_files, "TOKENS", 20)


def texts(corpus, kind=None):
    starts = corpus.type_starts.tolist()
    span = (0, len(corpus)) if kind is None else starts[kind : kind + 2]
    return [corpus.document_tokens(*one).tolist() for one in corpus.documents(*span)]


@pytest.fixture
def three(tmp_path):
    """Corpora a, b and c, and the texts of their documents."""
    made = [documents_of([3, 20, 9], seed=1), documents_of([30, 0], seed=2), documents_of([8] * 5)]
    for name, documents in zip("abc", made):
        write(tmp_path / name, documents, sources=[f"{name}.txt"], language=f"l-{name}")
    return {name: texts(Corpus(tmp_path / name)) for name in "abc"}


def test_merge_joins_same_ids_and_keeps_others_apart(tmp_path, three):
    prefixes = [tmp_path / name for name in "abc"]
    header = merge(prefixes, [7, 2, 7], tmp_path / "new")
    corpus = Corpus(tmp_path / "new")
    assert texts(corpus, 0) == three["b"]  # ids in order: 2, then 7
    assert texts(corpus, 1) == three["a"] + three["c"]
    assert [kind.name for kind in header.types] == ["b", "a+c"]
    assert header.sources == ("a.txt", "b.txt", "c.txt")
    assert header.language == "l-a+l-b+l-c"
    verify(tmp_path / "new")


def test_merge_of_merged_corpora_joins_like_with_like(tmp_path, three):
    merge([tmp_path / "a", tmp_path / "b"], [0, 1], tmp_path / "ab")
    merge([tmp_path / "c", tmp_path / "a"], [0, 1], tmp_path / "ca")
    inputs = [tmp_path / name for name in ("ab", "ca", "b")]
    merge(inputs, [0, 0, 5], tmp_path / "new")
    corpus = Corpus(tmp_path / "new")
    expected = [three["a"] + three["c"], three["b"] + three["a"], three["b"]]
    assert [texts(corpus, kind) for kind in range(3)] == expected
    assert len({kind.name for kind in corpus.header.types}) == 3
    verify(tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(tokenizer=tokenizer(name="other", fingerprint="e" * 64)), "'tiny'.*'other'"),
        (dict(vocab_size=1001), "vocabularies: 1000 and 1001"),
        (dict(rules=CutRules(seq_length=9)), "8 and 9"),
    ],
)
def test_corpora_that_do_not_belong_together_are_named(tmp_path, settings, words):
    for name, own in (("a", {}), ("b", settings)):
        write(tmp_path / name, documents_of([3]), **own)
    with pytest.raises(DataError, match=f"(?s)/a and .*/b .*{words}"):
        merge([tmp_path / "a", tmp_path / "b"], [0, 0], tmp_path / "new")
    assert not list(tmp_path.glob("new*"))


def test_a_tokenizer_may_have_been_in_another_folder(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, documents_of([3]), tokenizer=tokenizer(name=name, folder=name))
    assert merge([tmp_path / "a", tmp_path / "b"], [0, 0], tmp_path / "new").num_documents == 2


def test_arguments_that_do_not_fit_are_named(tmp_path):
    write(tmp_path / "a", documents_of([3]))
    with pytest.raises(UserError, match="1 corpora to merge and type ids"):
        merge([tmp_path / "a"], [0, 1], tmp_path / "new")
    (tmp_path / "x").symlink_to(tmp_path)
    with pytest.raises(UserError, match="not changed in place"):
        merge([tmp_path / "a"], [0], tmp_path / "x" / "a", overwrite=True)
    with pytest.raises(UserError, match="not changed in place"):
        remove(tmp_path / "a", tmp_path / "x" / "a", [0], overwrite=True)
    assert len(Corpus(tmp_path / "a")) == 1


def test_remove_leaves_exactly_the_rest(tmp_path, three):
    merge([tmp_path / name for name in "abc"], [0, 1, 2], tmp_path / "all")
    corpus = Corpus(tmp_path / "all")
    random = numpy.random.default_rng(0)
    for _ in range(5):
        gone = random.choice(len(corpus), random.integers(0, len(corpus) + 1), replace=False)
        remove(tmp_path / "all", tmp_path / "left", gone, overwrite=True)
        left = Corpus(tmp_path / "left")
        stay = [i for i in range(len(corpus)) if i not in set(gone.tolist())]
        assert [left[i].tolist() for i in range(len(left))] == [corpus[i].tolist() for i in stay]
        counts = numpy.searchsorted(stay, corpus.type_starts)
        assert left.type_starts.tolist() == counts.tolist()
        # a document of the rest holds tokens that were neighbours in one document
        owner = {i: d for d, one in enumerate(corpus.documents()) for i in range(*one)}
        breaks = [
            n
            for n, i in enumerate(stay)
            if n == 0 or stay[n - 1] != i - 1 or owner[i] != owner[i - 1]
        ]
        assert [first for first, _ in left.documents()] == breaks
        verify(tmp_path / "left")


def test_wrong_indices_are_named(tmp_path):
    write(tmp_path / "a", documents_of([20, 38]))
    with pytest.raises(UserError, match="segments 0 to 7, .* 99"):
        remove(tmp_path / "a", tmp_path / "b", [5, 99])


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_files, "TOKENS", 1 << 14)
    monkeypatch.setattr(corpus_files, "STEP", 256)
    peaks = {}
    for times in (1, 8):  # 0.5 and 4 MB of tokens
        prefix = tmp_path / str(times)
        writer = CorpusWriter(
            prefix, tokenizer=tokenizer(), rules=CutRules(1024), language="en", overwrite=True
        )
        for _ in range(times):
            writer.add(segments_of([[[1, *[5] * 1022, 2]]] * 256))
        writer.close()
        todo = {
            "merge": lambda p=prefix: merge([p], [0], f"{p}-new"),
            "remove": lambda p=prefix: remove(p, f"{p}-left", range(7)),
            "verify": lambda p=prefix: verify(p),
        }
        for name, work in todo.items():
            tracemalloc.start()
            work()
            peaks.setdefault(name, []).append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert all(large < small + 100_000 for small, large in peaks.values())


# verify


def _flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_the_middle_is_found(tmp_path):
    prefix = tmp_path / "a"
    writer = CorpusWriter(
        prefix, tokenizer=tokenizer(), rules=CutRules(1 << 17), language="en", sources=["x"]
    )
    writer.add(segments_of([[[1, *[5] * 99_998, 2]]]))  # the middle is beyond both ends' 64 KiB
    writer.close()
    _flip(path_of(prefix, ".bin"), 100_000)
    assert len(Corpus(prefix)) == 1  # opening does not read the middle
    with pytest.raises(DataError, match="other bytes"):
        verify(prefix)
    for place in (0, -1):
        _flip(path_of(prefix, ".bin"), place)
        with pytest.raises(DataError, match="swapped with another corpus"):
            Corpus(prefix)
        _flip(path_of(prefix, ".bin"), place)


# stats


def test_stats_are_those_of_plain_lists(tmp_path, three):
    merge([tmp_path / name for name in "abc"], [0, 1, 2], tmp_path / "all")
    found = stats(tmp_path / "all")
    assert found.seq_length == 8 and [kind.name for kind in found.types] == ["a", "b", "c"]
    # a: documents of 5, 22 and 11 tokens: 5 | 8 8 6 | 8 3
    first = found.types[0]
    assert first.histogram.tolist() == [0, 0, 0, 1, 0, 1, 1, 0, 3]
    assert (first.num_documents, first.num_cut_documents, first.num_tokens) == (3, 2, 38)
    assert first.num_rows == {"segments": 6, "packed": 5, "chunks": 5}
    assert first.padding["segments"] == pytest.approx(1 - 38 / 48)
    # b: 32 and 2 tokens; c: five documents of 10, each 8 | 2
    assert found.types[1].num_rows == {"segments": 5, "packed": 5, "chunks": 5}
    assert found.types[2].num_rows == {"segments": 10, "packed": 7, "chunks": 7}
    assert found.whole.num_segments == 21 and found.whole.num_rows["packed"] == 17
    assert found.whole.histogram.sum() == 21


def test_whole_documents_that_chunks_would_cut_are_counted(tmp_path):
    # 5 | 5 | 6 | 8 tokens in rows of 8: the second, the fourth are not; borders at 8, 16
    write(tmp_path / "a", documents_of([3, 3, 4, 6]))
    assert stats(tmp_path / "a").types[0].num_chunk_cuts == 1
