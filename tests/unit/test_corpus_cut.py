"""Documents cut into pieces: checked against plain loops over characters and tokens."""

import contextlib
import json
import random
import re
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.corpus import sentences
from stageline.corpus.cut import DocumentCutter, cut_document, fewest
from stageline.corpus.header import CutRules
from stageline.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def _tokens(text):
    """A toy tokenizer: words with the space before them, cut every 4 bytes, inside letters too."""
    ends, end = [], 0
    for word in re.findall(r"\s?\w+|\s|[^\w\s]", text):
        size = len(word.encode())
        ends += [*range(end + 4, end + size, 4), end + size]
        end += size
    assert end == len(text.encode())
    return numpy.arange(len(ends), dtype=numpy.uint32), numpy.array(ends, dtype=numpy.int64)


def _cut(text, *, splitter=sentences.auto, limit, num_first=1, num_last=1):
    ids, ends = _tokens(text)
    rules = CutRules(limit)
    return cut_document(
        text, ids, ends, splitter=splitter, rules=rules, num_first=num_first, num_last=num_last
    )


def _texts(text, cut):
    """Decode each piece; fail on half a character."""
    ends = _tokens(text)[1][numpy.cumsum(cut.lengths) - 1].tolist()
    data = text.encode()
    return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]


def _full(cut, num_first, num_last):
    lengths = cut.lengths.tolist()
    lengths[0] += num_first
    lengths[-1] += num_last
    return lengths


def _sentence_lengths(text, splitter, num_first, num_last):
    """Return tokens of each sentence, by looking for each token's place in turn."""
    data, token_ends = text.encode(), _tokens(text)[1].tolist()
    is_place = [end == len(data) or data[end] & 0xC0 != 0x80 for end in token_ends]
    counts = []
    for end in splitter(text).tolist():
        place = len(text[:end].encode())
        fitting = [n for n, e in enumerate(token_ends, 1) if e >= place and is_place[n - 1]]
        counts.append(fitting[0])
    counts = sorted(set(counts))
    lengths = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    lengths[0] += num_first
    lengths[-1] += num_last
    return lengths


def _table(lengths, limit):
    """Return the number of segments, by the plain O(n^2) recurrence."""
    best = [0]
    for end in range(1, len(lengths) + 1):
        ways, total = [], 0
        for start in range(end - 1, -1, -1):
            total += lengths[start]
            if total > limit:
                break
            ways.append(best[start] + 1)
        best.append(min(ways))
    return best[-1]


def _all_cuttings(lengths, limit):
    """Return every list of ends whose segments fit, by number of segments."""
    places = range(1, len(lengths))
    for num_cuts in range(len(lengths)):
        found = [
            (*cuts, len(lengths))
            for cuts in combinations(places, num_cuts)
            if max(_pieces(lengths, (*cuts, len(lengths)))) <= limit
        ]
        if found:
            return found
    raise AssertionError("a unit does not fit")


def _pieces(lengths, ends):
    return [sum(lengths[a:b]) for a, b in zip((0, *ends), ends, strict=False)]


def test_the_fewest_and_the_longest_of_all_cuttings():
    """Among cuttings with the fewest segments, choose the longest first one, then the second."""
    for limit in (3, 4, 5, 7):
        for num_units in range(1, 6):
            for lengths in product((1, 2, 3), repeat=num_units):
                longest = max(_all_cuttings(lengths, limit))
                assert tuple(fewest(numpy.array(lengths), limit)) == longest


def test_longer_lists_agree_with_the_plain_table():
    dice = random.Random(0)
    for _ in range(300):
        limit = dice.randint(1, 40)
        lengths = [dice.randint(1, limit) for _ in range(dice.randint(1, 100))]
        found = fewest(numpy.array(lengths), limit).tolist()
        assert max(_pieces(lengths, found)) <= limit and len(found) == _table(lengths, limit)


def test_a_segment_takes_all_that_fits():
    assert fewest(numpy.array([3, 3, 3, 3]), 9).tolist() == [3, 4]


def _manual_pages():
    """Return texts of some thousand letters, from the answers that the repository has."""
    lines = (ROOT / "data/manpages_instruct.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        "\n".join(f"{row['question']} {row['answer']}" for row in rows[start : start + 80])
        for start in range(0, 800, 80)
    ]


@pytest.mark.parametrize("splitter", [sentences.english, sentences.auto])
def test_real_documents_get_the_fewest_pieces_of_whole_sentences(splitter):
    for text in _manual_pages():
        lengths = _sentence_lengths(text, splitter, 1, 1)
        assert max(lengths) <= 128 < sum(lengths)
        cut = _cut(text, splitter=splitter, limit=128)
        assert len(cut.lengths) == _table(lengths, 128)
        assert cut.num_cut_sentences == 0
        ends = set(splitter(text).tolist())
        place = 0
        for piece in _texts(text, cut):
            place += len(piece)
            assert place in ends  # no token of this text crosses the end of a sentence


_LETTERS = 'ab. ,\n!?"é。，”😀中'


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    st.text(_LETTERS, min_size=1, max_size=120),
    st.integers(6, 30),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([sentences.english, sentences.chinese, sentences.auto, None]),
)
def test_pieces_fit_and_decode_to_the_text(text, limit, num_first, num_last, splitter):
    cut = _cut(text, splitter=splitter, limit=limit, num_first=num_first, num_last=num_last)
    full = _full(cut, num_first, num_last)
    assert max(full) <= limit and min(cut.lengths) > 0
    assert "".join(_texts(text, cut)) == text
    if splitter is not None:
        lengths = _sentence_lengths(text, splitter, num_first, num_last)
        assert cut.num_cut_sentences == sum(length > limit for length in lengths)
        if max(lengths) <= limit:
            assert len(full) == _table(lengths, limit)


def test_without_a_splitter_all_but_the_last_piece_are_full():
    text = "word " * 300
    cut = _cut(text, splitter=None, limit=64, num_first=0, num_last=0)
    assert len(cut.lengths) == -(-len(_tokens(text)[0]) // 64)
    assert set(cut.lengths[:-1].tolist()) == {64}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one two three\nfour five six seven", ["one two three", "\nfour five six seven"]),
        ("one two, three four, five six", ["one two, three four,", " five six"]),
        ("一二，三四五六", ["一二，", "三四五六"]),
        ("one two three four five", ["one two three four", " five"]),
        ("aaaabbbbccccddddeeeeffff", ["aaaabbbbccccddddeeee", "ffff"]),
    ],
)
def test_a_sentence_too_long_is_cut_at_the_best_place(text, pieces):
    limit = len(_tokens(text)[0]) - 1
    whole = lambda text: numpy.array([len(text)])  # noqa: E731
    cut = _cut(text, splitter=whole, limit=limit, num_first=0, num_last=0)
    assert _texts(text, cut) == pieces
    assert cut.num_cut_sentences == 1


def test_a_character_longer_than_a_segment_is_told():
    ids, ends = numpy.zeros(6, numpy.uint32), numpy.arange(1, 7)
    with pytest.raises(UserError, match="'😀' is 4 token.*more than the 3 .*--seq-length"):
        cut_document(
            "a😀b", ids, ends, splitter=sentences.auto, rules=CutRules(3), num_first=1, num_last=1
        )


def test_tokens_that_end_at_one_place_stay_together():
    """Cut after a whole letter, where a tokenizer falls back to bytes that all end at its end."""
    ends = numpy.array([1, 4, 4, 4, 5, 6])
    cut = cut_document(
        "a中bc",
        numpy.zeros(6, numpy.uint32),
        ends,
        splitter=None,
        rules=CutRules(3),
        num_first=0,
        num_last=0,
    )
    assert cut.lengths.tolist() == [1, 3, 2]


@pytest.mark.parametrize("ends", [[], [3], [5, 3, 7]])
def test_a_splitter_that_breaks_its_rules_is_told(ends):
    with pytest.raises(UserError, match="rising character offsets"):
        _cut("one two", splitter=lambda text: numpy.array(ends), limit=3)


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (False, False)])
def test_a_segment_must_have_room_beside_bos_and_eos(bos, eos):
    encoder = SimpleNamespace(info=SimpleNamespace(name="t", bos_id=1, eos_id=2))
    for room in (0, 1):
        rules = CutRules(room + bos + eos, splits_sentences=False, adds_bos=bos, adds_eos=eos)
        with contextlib.nullcontext() if room else pytest.raises(UserError, match="no room for"):
            DocumentCutter(encoder, None, rules)
