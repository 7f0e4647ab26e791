"""Rows of a micro-batch, padded or packed, against what is written out token by token."""

from types import SimpleNamespace

import pytest
import torch

import prompt_fn as parts
from stageline.data.batches.batch import (
    count_samples,
    pack_rows,
    pad_rows,
    render_sample,
    row_width,
)
from stageline.data.text.encode import Encoded
from stageline.errors import UserError

PAD = 77


def sample(ids, targets):
    """Return a sample of token ids; `x` marks one that is trained on, `.` one that is not."""
    marks = [mark == "x" for mark in targets]
    return Encoded(list(ids), marks, [False] * len(marks))


ROWS = [sample([5, 6, 7], ".xx"), sample([8], "x"), sample([1, 2, 3, 4, 9], "..x.x")]


@pytest.mark.parametrize(
    ("longest", "multiple_of", "max_width", "wanted"),
    [
        (5, 1, None, 5),
        (5, 8, None, 8),
        (8, 8, None, 8),
        (9, 8, None, 16),
        (5, 8, 6, 6),  # not beyond the longest legal row
        (5, 8, 8, 8),
        (9, 8, 6, 9),  # the row is not cut here
    ],
)
def test_widths(longest, multiple_of, max_width, wanted):
    assert row_width(longest, multiple_of=multiple_of, max_width=max_width) == wanted


def test_rows_are_padded_on_either_side():
    right = pad_rows(ROWS, pad_token_id=PAD, multiple_of=3)
    assert right["input_ids"].tolist() == [
        [5, 6, 7, PAD, PAD, PAD],
        [8, PAD, PAD, PAD, PAD, PAD],
        [1, 2, 3, 4, 9, PAD],
    ]
    assert right["attention_mask"].tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
    ]
    assert right["labels"].tolist() == [
        [-100, 6, 7, -100, -100, -100],
        [8, -100, -100, -100, -100, -100],
        [-100, -100, 3, -100, 9, -100],
    ]
    left = pad_rows(ROWS, pad_token_id=PAD, side="left", with_labels=False)
    assert left["input_ids"].tolist() == [[PAD, PAD, 5, 6, 7], [PAD] * 4 + [8], [1, 2, 3, 4, 9]]
    assert left["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1] * 5]
    assert set(left) == {"input_ids", "attention_mask"}


SAMPLE = {"id": "s", "question": "Why [Q]?", "answer": " yes", "hint": "yes", "level": "2"}
TEMPLATE = "[IMAGE]\n<|im_start|>Q: [QUESTION]\nA: [ANSWER]<|im_end|>"


def notes_style(text, prompt):
    """The signature of the founding notes: a dict and a template -> a string."""
    return prompt.replace("[QUESTION]", text["question"]).replace("[ANSWER]", text["answer"])


def by_level(text, prompt):
    """Reads a number from a text, and strips."""
    return f"{'?' * int(text['level'])}{text['question']} {text['answer']}"


def without_answer(text, prompt, **others):
    return f"Q: {text['question']} A:"


def hides_answer(text, prompt):
    return text["answer"].strip().upper()


def rendered(prompt_fn, image_token=parts.none, **options):
    texts = {"prompt": TEMPLATE.removeprefix("[IMAGE]\n"), "processor": None}
    return render_sample(
        None, SAMPLE, prompt_fn=prompt_fn, image_token=image_token, **{**texts, **options}
    )


@pytest.mark.parametrize("for_generation", [False, True])
def test_a_prompt_fn_that_returns_a_string_is_that_of_fill(for_generation):
    expected = rendered(parts.fill, for_generation=for_generation)
    assert rendered(notes_style, for_generation=for_generation) == expected
    assert expected.target_spans() or for_generation


def test_what_is_learnt_of_a_string_is_the_answer():
    def learnt(prompt_fn, **options):
        found = rendered(prompt_fn, **options)
        return found.text, "".join(piece.text for piece in found if piece.is_target)

    assert learnt(by_level) == ("??Why [Q]?  yes", "  yes")
    assert learnt(by_level, for_generation=True) == ("??Why [Q]?", "")
    assert learnt(without_answer) == ("Q: Why [Q]? A: yes", " yes")
    assert learnt(without_answer, for_generation=True) == ("Q: Why [Q]? A:", "")
    with pytest.raises(UserError, match="hides_answer .* returned a str"):
        rendered(hides_answer)


@pytest.mark.parametrize("prompt_fn", [parts.fill, notes_style])
def test_an_image_token_on_strings_fills_the_template(prompt_fn):
    """The text of the data holds the token, too: no image goes there."""

    def on_text(prompt, images):
        return prompt.replace("[IMAGE]", "<image>" * len(images))

    processor = SimpleNamespace(image_token="<image>", image_processor=object())
    sample = {**SAMPLE, "question": "what is <image>?"}
    texts = {"prompt": TEMPLATE, "processor": processor}
    for images in (["one"], ["one", "two"]):
        one, other = (
            render_sample(images, sample, prompt_fn=fn, image_token=token, **texts)
            for fn, token in ((prompt_fn, on_text), (parts.fill, parts.image))
        )
        assert one.text == other.text and one.num_images == other.num_images == len(images)
        assert [piece for piece in one if piece.is_image or piece.text] == [
            piece for piece in other if piece.is_image or piece.text
        ]


def test_samples_of_a_packed_row_know_nothing_of_each_other():
    batch = pack_rows([[ROWS[0], ROWS[1], ROWS[0]], [], [ROWS[2]]], pad_token_id=PAD, multiple_of=4)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 5, 6, 7, PAD], [PAD] * 8, [1, 2, 3, 4, 9, *[PAD] * 3]],
        "attention_mask": [[1] * 7 + [0], [0] * 8, [1] * 5 + [0] * 3],
        # the first token of each is predicted by none of its own
        "labels": [
            [-100, 6, 7, -100, -100, 6, 7, -100],
            [-100] * 8,
            [-100, -100, 3, -100, 9, *[-100] * 3],
        ],
        "position_ids": [[0, 1, 2, 0, 0, 1, 2, 0], [0] * 8, [0, 1, 2, 3, 4, 0, 0, 0]],
        "sample_ids": [[0, 0, 0, 1, 2, 2, 2, -1], [-1] * 8, [0] * 5 + [-1] * 3],
    }
    assert count_samples(batch) == 3, "the one of a single token has nothing to learn"


def test_rows_that_learn_something_are_samples():
    silent = sample([3, 4], "..")
    batch = pad_rows([ROWS[0], silent, ROWS[2], ROWS[0]], pad_token_id=PAD)
    assert count_samples(batch) == 3
    pairs = pad_rows([ROWS[0], ROWS[2], silent, silent, ROWS[0], ROWS[0]], pad_token_id=PAD)
    pairs["loss_pairs"] = torch.tensor([0, 0, 1, 1, 2, 2])
    assert count_samples(pairs) == 2
