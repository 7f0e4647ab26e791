"""Splitters against sentences cut by hand."""

import numpy
import pytest

from stageline.corpus import sentences
from stageline.errors import UserError

# a line of page width that breaks off in a sentence
LINE = "A line that is as long as those which are wrapped in the midst of"


def _sentences(splitter, text):
    ends = splitter(text)
    assert ends.dtype == numpy.int64
    return [text[a:b] for a, b in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


@pytest.mark.parametrize(
    "expected",
    [
        ["So what?!", " Wait...", " No."],
        ['He said "go."', " She (the boss.) left.')", " Then?”", " End"],
        ['"Really?" he asked.', " He left... and came back."],
        ["Pi is 3.14 or so.", " See http://a.b/c?d=e. for more, v1.2."],
        ["Mr. Smith met Dr. J. R. Jones of the U.S. Army, e.g. Monday, i.e. Today.", " Yes."],
        ["See Fig. 3, No. 5 and pp. 7 to 9.", " He said no.", " Then 5 left on Jan. 3 again."],
        ["It was his.", " It's.", " Was it x.", " Option -V.", " End"],
        ["Title", "\n\nText of one line.", "\nx = 1", "\ny = 2"],
        [f"{LINE}\na sentence.", f"\n{LINE}\n  Sentences with Capitals.", " Next."],
        [LINE, "\n\nA blank line ends one."],
        [LINE, "\n- an item", "\n1. another (see 2. below) of them", "\n(b) the last", "\nText"],
        ["1. The first item.", "\n2. The second item.", "\na. And this. b."],
        ["x" * 130, "\nbehind a line that is longer than a page is wide"],
        ["  White before.", "\n\n\tAnd behind. \n\n "],
        [" \n\t "],
    ],
    ids=lambda expected: expected[0][:20],
)
def test_english(expected):
    assert _sentences(sentences.english, "".join(expected)) == expected
    assert _sentences(sentences.auto, "".join(expected)) == expected


@pytest.mark.parametrize(
    "expected",
    [
        ["真的吗？！", "是的。", "好！", "他走了……", "你呢？"],
        ["他说：“你好。”", "然后走了。", "「是！」", "（完。）", "『好？』"],
        ["“好！”，他说。", "又一句"],
        ["第一行", "\n第二行。", "\n\n第三行，\t还是第三行", "\n结束。 \n"],
        ["圆周率是 3.14，版本 2.0 见 a?b=c。", "对!", "好?", "完"],
    ],
    ids=lambda expected: expected[0][:20],
)
def test_chinese(expected):
    assert _sentences(sentences.chinese, "".join(expected)) == expected
    assert _sentences(sentences.auto, "".join(expected)) == expected


def test_mixed_text_gets_both_rules():
    expected = ["Mr. Wang came.", " 他来了。", "“好！”", "Then “Yes.”", " “Why?” he asked.", " 完"]
    assert _sentences(sentences.auto, "".join(expected)) == expected


def test_letters_beyond_the_basic_plane_count_once():
    assert _sentences(sentences.auto, "") == []
    assert _sentences(sentences.auto, "😀 one. 😀 Two。三") == ["😀 one.", " 😀 Two。", "三"]


def test_icu_is_asked_for_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "icu", None)
    sentences._icu_iterator.cache_clear()
    with pytest.raises(UserError, match="PyICU.*pip install.*auto"):
        sentences.icu("One. Two.")


def test_icu():
    pytest.importorskip("icu")
    sentences._icu_iterator.cache_clear()
    expected = ["😀 Mr. Smith came.", " He left.", "\nGone?", " Yes. "]
    assert _sentences(sentences.icu, "".join(expected)) == expected
