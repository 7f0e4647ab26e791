"""ROUGE and BLEU of answers: by hand where it can be, in scripts with and without spaces."""

import math

import pytest

from metric import text_bleu, text_overlap, text_rouge
from stageline.evaluation.figures import words
from stageline.evaluation.report import Bootstrap, format_report, make_report
from stageline.plotting.pictures import groups_figure, save_figure

pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")


def samples(*answers):
    return [{"answer": answer, "group": "g"} for answer in answers]


def predictions(*texts):
    return [{"prediction": text} for text in texts]


def test_words_of_scripts_without_spaces_are_characters():
    assert words("Don't say 北京2024, カナ!") == ["don", "t", "say", *"北京", "2024", *"カナ"]


def test_words_keep_what_belongs_to_their_letters():
    assert words("का cafe\u0301") == ["का", "caf\u00e9"], "ka, not k alone"


def test_bleu_goes_by_characters_in_all_scripts_without_spaces():
    kana, thai = "これはねこ", "นี่คือ"
    for text in (kana, thai):
        spelled = text_bleu(predictions(" ".join(text[:-1])), samples(" ".join(text)))
        assert text_bleu(predictions(text[:-1]), samples(text)) == spelled
        assert spelled["score"] > 0.5


def test_rouge_by_hand():
    """Said: 6 words, 5 of them of the 6 in the answer, in order; 4 of 5 pairs."""
    figures = text_rouge(predictions("A cat sat on the mat."), samples("the cat sat on the mat"))
    assert figures["rouge1"] == pytest.approx(5 / 6)
    assert figures["rouge2"] == pytest.approx(4 / 5)
    assert figures["score"] == figures["rougeL"] == pytest.approx(5 / 6)
    assert figures["per_sample"] == [figures["score"]] and figures["groups"] == {"g": [0]}


def test_rouge_l_is_the_longest_common_subsequence():
    figures = text_rouge(predictions("b a d c"), samples("a b c d"))
    assert figures["rouge1"] == 1.0 and figures["rougeL"] == pytest.approx(0.5)


def test_rouge_of_chinese_goes_by_characters():
    figures = text_rouge(predictions("他昨天去了北京"), samples("他今天去了北京"))
    assert figures["score"] == pytest.approx(6 / 7)


def test_the_best_reference_counts():
    rows = [{"answers": ["x y", "a b c"], "answer": "x y"}]
    assert text_rouge(predictions("a b c"), rows)["score"] == 1.0
    assert text_bleu(predictions("a b c d"), [{"answers": ["q", "a b c d"]}])["corpus_bleu"] == (
        pytest.approx(1.0)
    )


def test_corpus_bleu_by_hand():
    """n-gram precisions of both texts together, and the brevity penalty."""
    said, meant = "a b c d e f", "a b c d x f"
    matches, totals = (5 + 4, 3 + 3, 2 + 2, 1 + 1), (6 + 4, 5 + 3, 4 + 2, 3 + 1)
    mean = sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / 4
    penalty = math.exp(1 - 11 / 10)  # 10 words said, 11 meant
    figures = text_bleu(predictions(said, "p q r s"), samples(meant, "p q r s t"))
    assert figures["corpus_bleu"] == pytest.approx(penalty * math.exp(mean))


def test_all_in_one_and_the_report_of_graded_scores(tmp_path):
    rows = samples("the cat sat on the mat", "two", "three")
    figures = text_overlap(predictions("a cat sat on the mat", "two", ""), rows)
    assert figures["exact_match"] == pytest.approx(1 / 3) and 0 < figures["corpus_bleu"] < 1
    report = make_report(
        figures, settings={"metric": "text"}, samples=rows, bootstrap=Bootstrap(resamples=50)
    )
    assert report["interval_95"] is None and len(report["bootstrap_95"]) == 2
    assert report["score"] == pytest.approx((5 / 6 + 1 + 0) / 3) and report["num_unparsed"] == 1
    assert "rouge1" in report and " - " in format_report(report)
    save_figure(groups_figure(report), tmp_path / "groups.png")
    assert (tmp_path / "groups.png").stat().st_size
