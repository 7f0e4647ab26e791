"""Rows of a micro-batch, padded or packed, against what is written out token by token."""

import pytest
import torch

from stageline.data.batches.batch import count_samples, pack_rows, pad_rows, row_width
from stageline.data.text.encode import Encoded

PAD = 77


def sample(ids, targets):
    """Token ids, and which of them are learnt: `.` not, `x` so."""
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
        (9, 8, 6, 9),  # which is not cut here
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
