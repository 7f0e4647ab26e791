"""Tricky answers, each with what a careful reader would say."""

import pytest

from metric import contains, exact_match
from prompt_fn import chat
from stageline.errors import DataError
from stageline.evaluation.report import check_metric
from tests.helpers.chat_samples import say
from tests.helpers.chat_templates import format_tokenizer


def _is_right(metric, text, **sample):
    return bool(metric([{"prediction": text}], [sample])["per_sample"][0])


def test_exact_match_and_contains():
    assert _is_right(exact_match, " 7\n", answer="7")
    assert _is_right(exact_match, "Paris.", answers=["paris", "Lutetia"])
    assert not _is_right(exact_match, "It is 7", answer="7")
    assert _is_right(contains, "It is 7.", answer="7")
    assert not _is_right(contains, "It is 17.", answer="7")
    assert not _is_right(contains, "", answer="7")


@pytest.mark.parametrize(
    ("metric", "answer", "right", "wrong"),
    [
        (
            exact_match,
            "5",
            ["\\boxed{5}", "$\\boxed{5}$.", "<answer>5</answer>"],
            ["<answer>" * 2000],
        ),
        (exact_match, ".5", [".5", " .5."], ["5", "0.5"]),
        (exact_match, "-5", ["\u22125", "-5."], ["5"]),
        (contains, "3", ["is 3.", "3.0", "2, 3, 4", "1-3", "$3"], ["3.14", "0.3", "-3", "3,000"]),
        (contains, "200", ["200 or 1,200"], ["1,200", "200,000", "1200", "2.200"]),
        (contains, "ねこ", ["これはねこです"], ["いぬ"]),
        (contains, "हिन", ["हिन."], ["हिन्दी"]),
    ],
)
def test_numbers_and_scripts_as_they_are_written(metric, answer, right, wrong):
    for text in (*right, *wrong):
        assert _is_right(metric, text, answer=answer) == (text in right), text


@pytest.mark.parametrize("answers", [{}, {"answer": None}, {"answers": {"text": ["7"]}}])
def test_a_row_without_an_answer_is_named(answers):
    """None was the answer "none", and the keys of a dict were answers."""
    with pytest.raises(DataError, match="sample 3 has neither"):
        check_metric(exact_match, [{"id": 3, **answers}])


def test_the_last_turn_of_messages_is_the_answer():
    """The model is asked with what comes before it."""
    turns = [say("user", "Which?"), say("assistant", "Six"), say("user", "Sure?")]
    parts = [{"type": "text", "text": "Seven"}]
    samples = [
        {"id": "a", "messages": [*turns, say("assistant", "Seven")]},
        {"id": "b", "messages": [*turns, say("assistant", parts)]},
        {"id": "c", "messages": [*turns, say("assistant", "Six")], "answer": "seven"},
    ]
    said = [{"prediction": text} for text in ("seven.", "six", "Seven")]
    assert exact_match(said, samples)["per_sample"] == [1, 0, 1]
    tokenizer = format_tokenizer("chatml")
    asked = [chat(sample, "", processor=tokenizer, for_generation=True).text for sample in samples]
    assert [text.count("Seven") for text in asked] == [0, 0, 0] and asked[0].count("Six") == 1
    with pytest.raises(DataError, match="nor messages that end with the assistant's"):
        exact_match(said[:1], [{"id": "a", "messages": turns}])


def test_groups_and_score():
    predictions = [{"prediction": text} for text in ("1", "2", "3", "4")]
    samples = [
        {"answer": "1", "group": "a"},
        {"answer": "2", "group": "b"},
        {"answer": "0", "group": "a"},
        {"answer": "4"},
    ]
    result = exact_match(predictions, samples)
    assert result == {
        "score": 0.75,
        "per_sample": [1, 1, 0, 1],
        "groups": {"a": [0, 2], "b": [1]},
        "unparsed": [0, 0, 0, 0],
    }


def test_answers_that_say_nothing_are_wrong_and_counted():
    texts = ("", "I can't tell.", "left or right", "right", "left")
    predictions = [{"prediction": text} for text in texts]
    for metric in (exact_match, contains):
        result = metric(predictions, [{"answer": "left"}] * 5)
        assert result["unparsed"] == [1, 1, 0, 0, 0]


def test_as_many_predictions_as_samples():
    with pytest.raises(ValueError, match="longer"):
        exact_match([{"prediction": "1"}], [{"answer": "1"}, {"answer": "2"}])
