"""Documents to segments: every text comes back, within the limit, with the marks of the rules."""

import pickle
from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stageline.corpus.cut import CutCounts, DocumentCutter, join_lines
from stageline.corpus.encoder import load_encoder
from stageline.corpus.header import BEGINS, ENDS, HAS_BOS, HAS_EOS, CutRules
from stageline.corpus.sentences import auto, english
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 64


@pytest.fixture(scope="module")
def documents():
    """Real documents, most longer than a segment, some that fit, and odd ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "docs/glossary.zh.md").read_text(encoding="utf-8")
    return [
        *text.split("\n\n"),
        text,
        chinese,
        "one",
        " ",
        "x" * 900,
        "一二三四五" * 60,
        "a <s> and </s>\r\n in text",
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, documents):
    made = {
        "bytes": tiny_tokenizer(documents, vocab_size=900),
        "metaspace": tiny_metaspace_tokenizer(documents, prepend_scheme="first", adds_bos=False),
    }
    for name, tokenizer in made.items():
        made[name] = tmp_path_factory.mktemp("tokenizers") / name
        tokenizer.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def encoder(folders):
    return load_encoder(folders["bytes"])


def _by_document(segments):
    """Return (flags, token lists) of each document, read off the flags."""
    behind = numpy.cumsum(segments.lengths)
    assert behind[-1] == len(segments.tokens) and (segments.lengths > 0).all()
    found = []
    for flags, stop, length in zip(segments.flags, behind, segments.lengths, strict=True):
        if flags & BEGINS:
            found.append(([], []))
        found[-1][0].append(int(flags))
        found[-1][1].append(segments.tokens[stop - length : stop].tolist())
        if flags & ENDS:
            found[-1][0].append("ended")
    return found


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("bytes", (True, True)),
        ("bytes", (False, False)),
        ("metaspace", (True, True)),
    ],
)
def test_segments_are_the_ids_of_transformers_cut_up(folders, documents, name, marks):
    bos, eos = marks
    cutter = DocumentCutter(
        load_encoder(folders[name]), auto, CutRules(LIMIT, adds_bos=bos, adds_eos=eos)
    )
    segments, counts = cutter(documents)
    reference = AutoTokenizer.from_pretrained(folders[name])
    expected = reference(documents, add_special_tokens=False, split_special_tokens=True)
    found = _by_document(segments)
    assert len(found) == len(documents) == counts.num_documents
    for (flags, parts), ids in zip(found, expected["input_ids"], strict=True):
        assert all(len(part) <= LIMIT for part in parts)
        assert len(parts) == 1 or len(ids) + bos + eos > LIMIT
        whole = [token for part in parts for token in part]
        begin, end = [reference.bos_token_id] * bos, [reference.eos_token_id] * eos
        assert whole == begin + ids + end
        *flags, last = flags
        assert last == "ended"
        first_flag, last_flag = BEGINS + HAS_BOS * bos, ENDS + HAS_EOS * eos
        expected_flags = [0] * len(parts)
        expected_flags[0] += first_flag
        expected_flags[-1] += last_flag
        assert flags == expected_flags
    assert counts.num_segments == len(segments) > len(documents)
    assert counts.num_tokens == len(segments.tokens)
    assert counts.num_cut_documents == sum(len(parts) > 1 for _, parts in found)
    assert counts.num_sentences_cut >= 2  # the long word, and Chinese without a full stop


def test_batches_make_no_difference(encoder, documents):
    cutter = pickle.loads(pickle.dumps(DocumentCutter(encoder, english, CutRules(LIMIT))))
    segments, counts = cutter(documents)
    parts = [cutter([text]) for text in documents]
    assert tuple(map(sum, zip(*(count for _, count in parts), strict=True))) == counts
    for name in ("tokens", "lengths", "flags"):
        joined = numpy.concatenate([getattr(part, name) for part, _ in parts])
        numpy.testing.assert_array_equal(joined, getattr(segments, name))
        assert joined.dtype == getattr(segments, name).dtype


def test_a_document_of_exactly_the_limit_is_not_cut(encoder):
    (ids,) = encoder.encode(["one two three four five six seven eight. Nine ten."])
    text = encoder.decode(ids)
    for limit, num_segments in ((len(ids) + 2, 1), (len(ids) + 1, 2)):
        segments, _ = DocumentCutter(encoder, english, CutRules(limit))([text])
        assert len(segments) == num_segments


def test_empty_documents_give_no_segment(encoder):
    cutter = DocumentCutter(encoder, english, CutRules(LIMIT))
    segments, counts = cutter(["", "one", "", "two"])
    assert len(segments) == 2
    assert (counts.num_documents, counts.num_empty) == (2, 2)
    segments, counts = cutter([])
    assert len(segments) == len(segments.tokens) == len(segments.flags) == 0
    assert counts == CutCounts()
    assert cutter([""])[1] == CutCounts(num_empty=1)


def test_counts_documents_that_do_not_come_back(tmp_path, documents):
    spec = tiny_tokenizer(["plain"], vocab_size=300).backend_tokenizer.to_str()
    without_bell = Tokenizer.from_str(spec.replace('"ć":', '"ćć":'))  # the byte of U+0007
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=without_bell, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.kind == "tiktoken"
    texts = ["a bell \x07 rings", "none", "a" * 200 + "\x07. " + "b" * 200]
    segments, counts = DocumentCutter(encoder, english, CutRules(LIMIT))(texts)
    assert (counts.num_changed, counts.num_documents) == (2, 3)
    first = [token for part in _by_document(segments)[0][1] for token in part]
    expected = AutoTokenizer.from_pretrained(tmp_path)(texts[0], add_special_tokens=False)
    assert first[1:-1] == expected["input_ids"]


def test_lines_are_joined_where_newlines_are_not_kept(encoder):
    cases = {
        "a \n b": "a b",
        "a\r\nb\rc": "a b c",
        "\n\n a": " a",
        "a  b": "a  b",
        "a\t\n\n \n": "a ",
        " a\nb ": " a b ",
        "\n": " ",
        "": "",
    }
    assert {text: join_lines(text) for text in cases} == cases
    rules = CutRules(LIMIT, keeps_newlines=False)
    segments, _ = DocumentCutter(encoder, english, rules)(["one \n\n two"])
    assert encoder.decode(segments.tokens[1:-1]) == "one two"
