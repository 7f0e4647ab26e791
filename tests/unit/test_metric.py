"""Tricky answers, each with what a careful reader would say."""

import pytest

from metric import contains, exact_match, rotate_qa, spatial_mm, vsr, whats_up
from prompt_fn import chat
from stageline.errors import DataError
from stageline.evaluation.report import check_metric
from stageline.tasks.answers import parse_choice, parse_truth
from tests.helpers.chat_samples import say
from tests.helpers.chat_templates import format_tokenizer

CAPTION = "The dog is on the surfboard."


def _is_right(metric, text, **sample):
    return bool(metric([{"prediction": text}], [sample])["per_sample"][0])


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("true", True),
        ("True.", True),
        (" Yes, it is.", True),
        ("**False**", False),
        ("no", False),
        ("No, the dog is beside it.", False),
        ("The statement is not true.", False),
        ("The statement isn't true", False),
        ("That isn\u2019t really correct.", False),
        ("It is not false.", True),
        ("not incorrect", True),
        ("untrue", False),
        ("Incorrect", False),
        ("True or false? False.", False),
        ("The answer to the yes or no question is: yes", True),
        ("At first it looks true, but it is false.", False),
        ("Yes, the cat is not on the mat.", True),
        ("No. That would be correct only from behind.", False),
        ("The dog is on the surfboard.", True),
        ("The dog is not on the surfboard.", False),
        ("the dog isn't on the surfboard", False),
        ("The notion is accurate.", True),
        ("I know nothing.", None),
        ("The cat sleeps.", None),
        ("", None),
    ],
)
def test_truth(text, truth):
    assert parse_truth(text, statement=CAPTION) is truth
    for label in (0, 1):
        expected = truth is not None and truth == bool(label)
        assert _is_right(vsr, text, label=label, caption=CAPTION, answer="x") == expected


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("B", 1),
        ("b.", 1),
        ("(B)", 1),
        ("B. right", 1),
        ("B) right", 1),
        ("The answer is B.", 1),
        ("Answer: (d)", 3),
        ("I choose option C, top left", 2),
        ("right", 1),
        ("It is to the right of the table.", 1),
        ("on the left", 0),
        ("top left", 2),
        ("It is at the top left.", 2),
        ("upper left", 2),
        ("not left but right", 1),
        ("It isn't on the left, it is on the right", 1),
        ("behind", 3),
        ("at the back", 3),
        ("left or right", None),
        ("A dog is behind the cat", 3),
        ("The answer is a bright place", None),
        ("E", None),
        ("", None),
        ("leftover food", None),
    ],
)
def test_choice(text, index):
    assert parse_choice(text, ["left", "right", "top left", "behind"]) == index


def test_spatial_mm_with_and_without_options():
    options = {"choices": ["left", "right"], "answer_index": 1, "answer": "B. right"}
    assert _is_right(spatial_mm, "right", **options)
    assert _is_right(spatial_mm, "B", **options)
    assert not _is_right(spatial_mm, "A. left", **options)
    assert _is_right(spatial_mm, "The rug is pink.", answer="pink")
    assert not _is_right(spatial_mm, "pinkish", answer="pink")
    assert _is_right(spatial_mm, "upper left", answer="top left")


def test_whats_up_reads_captions_and_letters():
    sample = {
        "choices": ["A mug under a table", "A mug on a table", "A mug left of a table"],
        "answer_index": 1,
        "answer": "B. A mug on a table",
    }
    assert _is_right(whats_up, "B", **sample)
    assert _is_right(whats_up, "A mug on a table.", **sample)
    assert not _is_right(whats_up, "A mug under a table", **sample)
    assert not _is_right(whats_up, "A", **sample)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("left", "Left", True),
        ("left", "It is on the left-hand side.", True),
        ("left", "leftward", True),
        ("left", "right", False),
        ("left", "not right, left", True),
        ("left", "left and right", False),
        ("upper left", "top-left corner", True),
        ("upper left", "left", False),
        ("below", "underneath it", True),
        ("down", "upside down", False),
        ("upside down", "The picture is upside-down.", True),
        ("upright", "right", False),
        ("clockwise", "counter-clockwise", False),
        ("counterclockwise", "anti clockwise", True),
        ("counterclockwise", "anticlockwise", True),
        ("3 o'clock", "three o'clock", True),
        ("3 o'clock", "At 3 o\u2019clock.", True),
        ("3 o'clock", "3:00", True),
        ("3 o'clock", "3", True),
        ("3 o'clock", "13", False),
        ("twelve o'clock", "12 o'clock", True),
        ("12 o'clock", "2 o'clock", False),
        ("2 o'clock", "12 o'clock", False),
        ("90", "90 degrees", True),
        ("90 degrees", "90\u00b0", True),
        ("270", "-90", True),
        ("90", "between 90 and 180", False),
        ("0", "0", True),
        ("0", "10", False),
    ],
)
def test_rotate_qa(answer, text, right):
    assert _is_right(rotate_qa, text, answer=answer) == right


def test_rotate_qa_with_options():
    sample = {"choices": ["0 degrees", "90 degrees"], "answer": "(B)"}
    assert _is_right(rotate_qa, "B", **sample)
    assert _is_right(rotate_qa, "The picture is turned by 90 degrees.", **sample)
    assert not _is_right(rotate_qa, "(A)", **sample)
    assert _is_right(rotate_qa, "b)", choices=["left", "right"], answer="right")


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
        (rotate_qa, "270 degrees", ["\u221290\u00b0"], ["90\u00b0"]),
    ],
)
def test_numbers_and_scripts_as_they_are_written(metric, answer, right, wrong):
    for text in (*right, *wrong):
        assert _is_right(metric, text, answer=answer) == (text in right), text


def test_the_right_choice_is_one_of_them():
    """A place as `answer` was no option, so each answer was wrong; so were places from 1 on."""
    sample = {"id": 3, "choices": ["left", "right"]}
    assert _is_right(spatial_mm, "right", **sample, answer=1)
    assert _is_right(spatial_mm, "right", **sample, answer_index=1.0)
    for wrong in ({"answer": 2}, {"answer": "up"}, {"answer_index": 2}, {"answer_index": -1}):
        with pytest.raises(DataError, match="sample 3: .*the first being 0"):
            _is_right(spatial_mm, "", **sample, **wrong)


def test_a_label_is_what_it_says():
    """A text was true whatever it said."""
    assert _is_right(vsr, "no", label="0") and _is_right(vsr, "no", label="False")
    assert _is_right(vsr, "yes", label=1.0)
    with pytest.raises(DataError, match="the label is 'on'"):
        _is_right(vsr, "", label="on")


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
    choice = {"choices": ["left", "right"], "answer_index": 0, "answer": "A. left"}
    for metric, sample in (
        (spatial_mm, choice),
        (whats_up, choice),
        (rotate_qa, {"answer": "left"}),
    ):
        result = metric(predictions, [sample] * 5)
        assert result["unparsed"] == [1, 1, 1, 0, 0]
        assert result["per_sample"] == [0, 0, 0, 0, 1]
    for metric in (exact_match, contains):
        result = metric(predictions, [{"answer": "left"}] * 5)
        assert result["unparsed"] == [1, 1, 0, 0, 0]
    result = vsr(predictions[:3] + [{"prediction": "no"}], [{"label": 0, "answer": "false"}] * 4)
    assert (result["unparsed"], result["per_sample"]) == ([1, 1, 1, 0], [0, 0, 0, 1])


def test_words_that_are_denied_are_no_answer():
    assert not _is_right(spatial_mm, "It is not pink but red.", answer="pink")
    assert _is_right(spatial_mm, "It is not red but pink.", answer="pink")
    assert _is_right(contains, "他在左边。", answer="左边")
    assert not _is_right(exact_match, "", answer="东西")


def test_whats_up_counts_pairs_and_sets():
    samples = [
        {
            "choices": ["on", "under"], "answer_index": 0, "answer": "A. on",
            "pair": f"{thing} {pair}", "set": thing,
        }
        for thing in ("mug", "cup", "hat")
        for pair in ("x", "x", "y", "y")
    ]  # fmt: skip
    del samples[-1]  # one pair and one set are not whole
    right = [1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 1]
    predictions = [{"prediction": "ba"[hit]} for hit in right]
    result = whats_up(predictions, samples)
    assert result["per_sample"] == right
    assert (result["pair_accuracy"], result["num_pairs"]) == (3 / 5, 5)
    assert (result["set_accuracy"], result["num_sets"]) == (1 / 2, 2)


def test_as_many_predictions_as_samples():
    with pytest.raises(ValueError, match="longer"):
        exact_match([{"prediction": "1"}], [{"answer": "1"}, {"answer": "2"}])
