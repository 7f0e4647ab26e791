"""Tricky answers to the spatial sets, each with what a careful reader would say."""

import pytest

from examples.spatial.metrics import rotate_qa, spatial_mm, vsr, whats_up
from examples.spatial.rewards import spatial_choice, spatial_consistency
from stageline.errors import DataError


def _is_right(metric, text, **sample):
    return bool(metric([{"prediction": text}], [sample])["per_sample"][0])


def test_spatial_mm_with_and_without_options():
    options = {"choices": ["left", "right"], "answer_index": 1, "answer": "B. right"}
    assert _is_right(spatial_mm, "right", **options)
    assert _is_right(spatial_mm, "B", **options)
    assert not _is_right(spatial_mm, "A. left", **options)
    assert _is_right(spatial_mm, "The rug is pink.", answer="pink")
    assert not _is_right(spatial_mm, "pinkish", answer="pink")
    assert _is_right(spatial_mm, "upper left", answer="top left")


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("down", "upside down", False),
        ("upside down", "The picture is upside-down.", True),
        ("270", "-90", True),
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


def test_the_right_choice_is_one_of_them():
    """Accept `answer` as a place, from 0 on; it was not an option, so each answer was wrong."""
    sample = {"id": 3, "choices": ["left", "right"]}
    assert _is_right(spatial_mm, "right", **sample, answer=1)
    assert _is_right(spatial_mm, "right", **sample, answer_index=1.0)
    for wrong in ({"answer": 2}, {"answer": "up"}, {"answer_index": 2}, {"answer_index": -1}):
        with pytest.raises(DataError, match="sample 3: .*counted from 0"):
            _is_right(spatial_mm, "", **sample, **wrong)


def test_a_label_is_what_it_says():
    """A text was true whatever it said."""
    assert _is_right(vsr, "no", label="0") and _is_right(vsr, "no", label="False")
    assert _is_right(vsr, "yes", label=1.0)
    with pytest.raises(DataError, match="the label is 'on'"):
        _is_right(vsr, "", label="on")


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
    result = vsr(predictions[:3] + [{"prediction": "no"}], [{"label": 0, "answer": "false"}] * 4)
    assert (result["unparsed"], result["per_sample"]) == ([1, 1, 1, 0], [0, 0, 0, 1])


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


def test_a_reward_reads_options_by_their_meaning():
    sample = {"choices": ["left", "top left"], "answer": "top left", "question": "Where?"}
    texts = ["upper left", "(B)", "left", "left or right"]
    assert spatial_choice(["?"] * 4, texts, [sample] * 4) == [1, 1, 0, 0]
    verdict = {"choices": ["yes", "no"], "answer": "no"}
    assert spatial_choice(["?"] * 2, ["That is not true.", "Indeed."], [verdict] * 2) == [1, 0]


def test_views_of_a_scene_have_to_agree():
    samples = [
        {"contrast_group": "s", "id": view, "answer": answer, "question": "Where?"}
        for view, answer in (("plain", "left"), ("mirrored", "right"))
        for _ in range(2)
    ]
    samples.append({"contrast_group": "t", "id": "alone", "answer": "left"})
    texts = ["left", "It is on the left.", "right", "left", "left"]
    found = spatial_consistency([""] * 5, texts, samples)
    assert found == [1, 0, 1, 0, None]
