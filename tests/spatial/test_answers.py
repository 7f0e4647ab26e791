"""The rules of docs/metrics.md in one table: rule, kind, text -> how a careful reader reads it."""

import re
from pathlib import Path

import pytest

from examples.spatial.answers import (
    parse_angle,
    parse_choice,
    parse_clock,
    parse_directions,
    parse_truth,
)
from stageline.inference.answer_text import says_nothing

ROOT = Path(__file__).resolve().parents[2]
STATEMENT = "The dog is on the surfboard."
PLACES = ["left", "right", "top left", "behind"]
CAPTIONS = ["A mug under a table", "A mug on a table", "A mug to the left of a table"]
HOURS = ["3 o'clock", "9 o'clock", "12 o'clock"]
TURNS = ["0 degrees", "90 degrees", "180 degrees"]
READERS = {
    "truth": lambda text: parse_truth(text, statement=STATEMENT),
    "places": lambda text: parse_choice(text, PLACES),
    "captions": lambda text: parse_choice(text, CAPTIONS),
    "yes_no": lambda text: parse_choice(text, ["yes", "no"]),
    "hours": lambda text: parse_choice(text, HOURS),
    "turns": lambda text: parse_choice(text, TURNS),
    "on_top": lambda text: parse_choice(text, ["below", "top", "under", "on"]),
    "direction": lambda text: " ".join(sorted(parse_directions(text))),
    "clock": parse_clock,
    "angle": parse_angle,
    "nothing": says_nothing,
}

ROWS = [
    # answers that are read at all
    (1, "direction", "**Left**", "left"),
    (1, "direction", "It isn\u2019t on the left.", ""),
    (1, "places", "\uff08\uff22\uff09", 1),
    (1, "direction", "<think>left? no</think>right", "right"),
    (1, "direction", "the left hand</think> right", "right"),
    (1, "direction", "<think>It may be left, and", ""),
    (1, "places", "$\\boxed{\\text{B}}$", 1),
    (1, "places", "left? <answer>(D)</answer>", 3),
    (2, "truth", "", None),
    (2, "truth", "I cannot determine whether the statement is true.", None),
    (2, "truth", "I'm not sure, but yes", True),
    (2, "direction", "I'm sorry, I can't say if it's left or right.", ""),
    (2, "nothing", "As an AI model I see no picture", True),
    (2, "nothing", "pink", False),
    # where in the text
    (3, "direction", "Is it on the left or the right? Left.", "left"),
    (3, "places", "A. left B. right C. top left D. behind\nB", 1),
    (4, "places", "From his side left becomes right, so the answer is (B).", 1),
    (4, "direction", "I don't think the answer is left, it is right", "right"),
    (4, "clock", "12 o'clock is ahead. The answer is 3 o'clock.", 3),
    (5, "direction", "left... actually right", "right"),
    (5, "direction", "Left - wait, I mean behind it", "back"),
    (5, "direction", "Left. Actually, I can't tell.", ""),
    (6, "direction", "The cup is near the right hand. Therefore it is on the left", "left"),
    (6, "places", "His left hand is on our right side, so it is right", 1),
    (7, "direction", "Left. The right side is empty, nothing stands there.", "left"),
    (7, "direction", "Left.\nThe picture shows a cup and a plate on it.\nRight.", ""),
    # negation
    (8, "direction", "not on the left", ""),
    (8, "direction", "neither on the left nor the right, but above", "up"),
    (8, "direction", "left, not right", "left"),
    (8, "direction", "not left but right", "right"),
    (8, "direction", "It's not on the left of the cup; it's below", "down"),
    (8, "direction", "not only left but also above", "left up"),
    (8, "places", "It isn't A, it's D.", 3),
    (8, "clock", "not 3 o'clock but 9 o'clock", 9),
    # Chinese
    (9, "direction", "左上方", "left up"),
    (9, "direction", "不是左边，而是右边", "right"),
    (9, "direction", "左边还是右边？右边", "right"),
    (9, "direction", "逆时针", "counterclockwise"),
    (9, "truth", "是的，狗在冲浪板上。", True),
    (9, "truth", "这个说法不正确", False),
    (9, "truth", "不是错误的", True),
    (9, "angle", "没有旋转", 0),
    (9, "clock", "十点半", None),
    (9, "places", "选（D）", 3),
    (9, "places", "左边，因为右边没有东西", 0),
    # yes and no
    (10, "truth", "No, the dog is beside it; all else is true", False),
    (10, "truth", "The dog is on the right", None),
    (10, "truth", "Yes, the statement is false.", None),
    (10, "truth", "No doubt it is true", True),
    (10, "truth", "0", False),
    (11, "truth", "It's not false", True),
    (11, "truth", "It is not the case that the dog swims", False),
    (11, "truth", "not really", False),
    (11, "truth", "I don't think so.", False),
    (12, "truth", "yes and no", None),
    (12, "truth", "True or false: false", False),
    (13, "truth", "the dog isn't on the surfboard", False),
    # options
    (14, "places", "B) right", 1),
    (14, "places", "To me it looks like (B) in this picture", 1),
    (14, "places", "(B) fits, while (A) shows a table", 1),
    (14, "places", "(E)\nIt is left", None),
    (14, "places", "A dog is behind the cat", 3),
    (14, "places", "The answer is a bright place", None),
    (14, "places", "B. left", 1),
    (14, "places", "E. left", None),
    (15, "places", "A or B", None),
    (16, "places", "It is right, on the right of the table.", 1),
    (16, "places", "It is at the top left", 2),
    (16, "places", "left or right", None),
    (16, "captions", "The mug is on the table.", 1),
    (16, "captions", "A mug on a table or a mug under a table", None),
    (16, "on_top", "beneath", None),
    (17, "places", "upper left", 2),
    (17, "yes_no", "No, it isn't", 1),
    (17, "yes_no", "There is no cat, so yes", 0),
    (17, "hours", "nine o'clock", 1),
    (17, "turns", "It is upside down", 2),
    # directions
    (18, "direction", "on its left-hand side", "left"),
    (18, "direction", "on top of the box", "up"),
    (19, "direction", "upper-left corner", "left up"),
    (19, "direction", "north-east", "east north"),
    (19, "direction", "upside-down", "upside down"),
    (20, "direction", "on the left or above", ""),
    (20, "direction", "on the left or left-hand side", "left"),
    (21, "direction", "that's right, it is left", "left"),
    (21, "direction", "right behind the sofa", "back"),
    (21, "direction", "leftover food", ""),
    # clock positions
    (22, "clock", "3 o'clock", 3),
    (22, "clock", "At 3 o\u2019 clock.", 3),
    (22, "clock", "03:00", 3),
    (22, "clock", "the eleven o'clock position", 11),
    (23, "clock", "15:00", 3),
    (23, "clock", "0:00", 12),
    (24, "clock", "3 pm", 3),
    (24, "clock", "13", None),
    (24, "clock", "2 cups, at 4 o'clock", 4),
    (25, "clock", "between 2 and 3 o'clock", None),
    (25, "clock", "half past three", None),
    # angles
    (26, "angle", "90 degrees", 90),
    (26, "angle", "one hundred and eighty", 180),
    (26, "angle", "90 degrees counter-clockwise", 270),
    (26, "angle", "90.5", None),
    (26, "angle", "It is not rotated.", 0),
    (26, "angle", "upside down", 180),
]


@pytest.mark.parametrize(("rule", "kind", "text", "said"), ROWS)
def test_answer(rule, kind, text, said):
    found = READERS[kind](text)
    assert (found, type(found)) == (said, type(said))


def test_what_was_asked_is_no_answer():
    question = "Is this statement true or false? The dog is on the surfboard."
    for text, said in ((question, None), (f"{question} False.", False), ("True", True)):
        assert parse_truth(text, statement=STATEMENT, question=question) is said
    question = "Where is it, left or right of the cup"
    assert parse_directions(f"{question}: right", question=question) == {"right"}


def test_an_angle_turns_as_was_asked():
    asked = "By how many degrees counterclockwise is it turned?"
    assert parse_angle("90", question=asked) == parse_angle("90 degrees counterclockwise") == 270
    assert parse_angle("90 degrees clockwise", question=asked) == 90


def test_each_rule_of_the_guide_has_rows():
    """The numbered list of the guide and the table name the same rules."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rules = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert rules == list(range(1, len(rules) + 1))
    assert set(rules) == {rule for rule, *_ in ROWS}
